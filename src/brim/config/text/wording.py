"""Put values into words for a message, and match a misspelt name with the nearest valid one."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from brim.config.text.writing import mask_text

_LONGEST_SHOWN = 60  # characters


_PLAIN = re.compile(r"[A-Za-z_./~][\w./-]*|\d[\w.-]*[A-Za-z]")  # texts that need no quotes in YAML


_NO_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "~", "y", "n")


_SHELL_SAFE = re.compile(r"[\w@%+=:,./-]+")


def show(value: Any) -> str:
    """Write a value as in YAML, short and without secrets."""
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


def _show_list(value: list[Any]) -> str:
    if not value:
        return "an empty list"
    if all(isinstance(item, (bool, int, float, str)) for item in value):
        text = mask_text(json.dumps(value, ensure_ascii=False))
        if len(text) <= _LONGEST_SHOWN:
            return text
    return f"a list of {len(value)} entries" if len(value) > 1 else "a list of one entry"


def line(key: str, value: Any, *, as_override: bool = False) -> str:
    """Write a key and its value as in a file (`a.b: 1`) or as an override (`a.b=1`, quoted for a shell)."""
    if not as_override:
        return f"{key}: {flow(value)}"
    text = f"{key}={flow(value)}"
    return text if _SHELL_SAFE.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'"


def flow(value: Any) -> str:
    """Write a value as YAML on one line, without secrets."""
    if isinstance(value, str):
        text = mask_text(value)
        return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT else json.dumps(text, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(key))}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return show(value)


def shortened(text: str) -> str:
    """Return a text on one line, short enough for a message."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def misspelt(name: str, names: Iterable[str], *, at_most: int = 2) -> str | None:
    """Return the name that is surely meant: equal except for case and dashes, or misspelt by a typing slip.

    A slip is one letter too many, too few, swapped, or, from five letters on, a wrong one (`rat` is not a slip of
    `cat`). Names of eight letters or more may have two, unless `at_most` is one. If two names are equally near, the
    answer is None: a wrong guess is worse than none.
    """
    plain = folded(name)
    most = 0 if len(plain) < 3 else 1 if len(plain) < 8 else at_most
    distances = {other: _slips(plain, folded(other), most) for other in names}
    near = [other for other, slips in distances.items() if slips == min(distances.values())]
    return near[0] if len(near) == 1 and distances[near[0]] <= most else None


def _slips(first: str, second: str, most: int) -> int:
    """Count the letters to remove, insert, replace or swap to turn one into the other; at most `most` + 1."""
    if abs(len(first) - len(second)) > most:
        return most + 1
    replaced = 1 if len(first) >= 5 else 2
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        before, last, row = row, before, [i]
        for j, b in enumerate(second, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + replaced * (a != b)))
            if i > 1 and j > 1 and a == second[j - 2] and b == first[i - 2]:
                row[j] = min(row[j], last[j - 2] + 1)
    return min(row[-1], most + 1)


def nearest(name: str, names: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """Return the most similar of the names, if its similarity is `at_least` this; 1 is equal."""
    candidates = [(SequenceMatcher(None, folded(name), folded(other)).ratio(), other) for other in names]
    ratio, best = max(candidates, default=(0.0, ""), key=lambda item: item[0])
    return best if ratio >= at_least else None


def folded(name: str) -> str:
    """Return the name in lower case with its words joined by underscores: differences that do not count as slips."""
    return name.lower().replace("-", "_").replace(" ", "_")
