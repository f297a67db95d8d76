"""Words for values in messages, and the nearest valid name for a misspelt one."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from brim.config.mask import mask_text

_LONGEST_SHOWN = 60  # characters


def show(value: Any) -> str:
    """A value as it reads in YAML, short and without secrets."""
    if isinstance(value, str):
        return f"'{shortened(mask_text(value))}'" if value else "empty"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return shortened(repr(value))
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return _show_list(value)
    if isinstance(value, (datetime.date, datetime.datetime)):
        return f"the date {value}"
    return f"a Python {type(value).__name__}"


def nearest(name: str, names: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """The most similar of the names, if any is similar enough; 1 is equal."""
    candidates = [(SequenceMatcher(None, _folded(name), _folded(other)).ratio(), other) for other in names]
    ratio, best = max(candidates, default=(0.0, ""), key=lambda item: item[0])
    return best if ratio >= at_least else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _show_list(value: list[Any]) -> str:
    if not value:
        return "an empty list"
    if all(isinstance(item, (bool, int, float, str)) for item in value):
        text = mask_text(json.dumps(value, ensure_ascii=False))
        if len(text) <= _LONGEST_SHOWN:
            return text
    return f"a list of {len(value)} entries" if len(value) > 1 else "a list of one entry"


def shortened(text: str) -> str:
    """A text on one line, and not too long for a message."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
