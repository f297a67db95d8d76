"""The environment's secrets, by the names of their variables: what must stand in no file and no message."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|(ACCESS|SECRET|PRIVATE)_KEY)$", re.IGNORECASE)
_SHORTEST = 12  # characters; a shorter value may stand in any text


def secrets_of_environment() -> list[str]:
    """The values as they are and as addresses write them, the longest first."""
    values = {value for name, value in os.environ.items() if len(value) >= _SHORTEST and _NAMES.search(name)}
    return sorted(values | {quote(value, safe="") for value in values}, key=len, reverse=True)
