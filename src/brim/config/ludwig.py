"""Name the keys and values that Ludwig has for language models and brim does not support yet; ignore none.

The table is `ludwig.json`: keys by section and matter, each with the values that change nothing; values by key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from brim.config.findings import Finding
from brim.config.text import KeyPath, dotted, flow, value_at


def take_unsupported(data: dict[str, Any]) -> list[Finding]:
    """Take the unsupported keys out of a configuration, and return what was found among them.

    Keys whose value means "off" change nothing and are not reported.
    """
    findings = []
    for entry in unsupported_keys():
        for path in _matches(data, tuple(entry.key.split("."))):
            value = value_at(data, path[:-1]).pop(path[-1])
            if not _is_off(value, entry):
                what = f"{dotted(path)} is not supported yet ({entry.about})"
                findings.append(Finding(paths=(path,), what=what, fix=entry.instead or "remove it", kind="unknown"))
    for known in unsupported_values():
        for path in _matches(data, tuple(known.key.split("."))):
            value = value_at(data, path)
            name = value.get("type") if isinstance(value, dict) and known.is_type else value
            if isinstance(name, (str, bool, type(None))) and name in known.values:
                key = (*path, "type") if isinstance(value, dict) else path
                what = f"{dotted(key)}: {name if isinstance(name, str) else flow(name)} is not supported yet"
                fault = Finding(paths=(key,), what=what, expected=known.expected, fix=known.instead, kind="value")
                findings.append(fault)
                value_at(data, path[:-1]).pop(path[-1])
    return findings


def _matches(data: Any, pattern: tuple[str, ...], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the given paths that fit a pattern, in which "*" stands for any entry of a list or mapping."""
    if not pattern:
        yield path
        return
    head, rest = pattern[0], pattern[1:]
    if head == "*" and isinstance(data, list):
        for index, entry in enumerate(data):
            yield from _matches(entry, rest, (*path, index))
    elif head == "*" and isinstance(data, dict):
        for name, entry in data.items():
            yield from _matches(entry, rest, (*path, name))
    elif isinstance(data, dict) and head in data:
        yield from _matches(data[head], rest, (*path, head))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedKey:
    """Describe a key of Ludwig's. Values in `off`, and null, change nothing and are accepted."""

    key: str  # dotted; "*" stands for an entry of a list or mapping
    about: str
    instead: str
    off: tuple[Any, ...]
    off_when_empty: bool  # a section whose keys are all null, 0 or empty is off


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedValue:
    """Describe values of a supported key that Ludwig knows and brim does not yet."""

    key: str
    values: tuple[Any, ...]
    expected: str
    instead: str = ""
    is_type: bool = False  # the value may also stand as `type` of a section
    why: str = ""  # for who reads the table


@cache
def unsupported_keys() -> tuple[UnsupportedKey, ...]:
    """Return the keys that are named, in the order of the table."""
    return tuple(
        UnsupportedKey(
            key=f"{row['section']}.{name}".lstrip("."),
            about=row["about"],
            instead=row.get("instead", ""),
            off=tuple(off),
            off_when_empty=row.get("off_when_empty", False),
        )
        for row in _table()["keys"]
        for name, off in row["off"].items()
    )


@cache
def unsupported_values() -> tuple[UnsupportedValue, ...]:
    """Return the values that are named, in the order of the table."""
    return tuple(UnsupportedValue(**{**row, "values": tuple(row["values"])}) for row in _table()["values"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table


def _is_off(value: Any, entry: UnsupportedKey) -> bool:
    if isinstance(value, dict) and entry.off_when_empty:
        return all(item in (None, 0, {}) for item in value.values())
    return value is None or any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in entry.off)
