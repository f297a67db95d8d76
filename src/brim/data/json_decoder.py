"""Python's JSON parser, made to refuse a key that stands twice in one object, of which it would keep the last."""

from __future__ import annotations

import json
from typing import Any


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError, which is told as any other fault of the JSON."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
