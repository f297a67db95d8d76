"""Keys and values that Ludwig has for language models and brim does not support yet: named, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim.config.findings import Finding
from brim.config.places import Path, dotted, value_at
from brim.config.unsupported_table import KEYS, VALUES, UnsupportedKey, UnsupportedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """A configuration without Ludwig's unsupported keys, and what was found among them."""

    data: dict[str, Any]
    findings: list[Finding]


def screen(data: dict[str, Any]) -> Screened:
    """Take out the unsupported keys. Those whose value means "off" change nothing and are not reported."""
    data = _copied(data)
    findings = []
    for entry in KEYS:
        for path in _matches(data, tuple(entry.key.split("."))):
            value = value_at(data, path[:-1]).pop(path[-1])
            if not _is_off(value, entry):
                findings.append(_key_finding(path, entry))
    for value_entry in VALUES:
        for path in _matches(data, tuple(value_entry.key.split("."))):
            parent, value = value_at(data, path[:-1]), value_at(data, path)
            name = value.get("type") if isinstance(value, dict) and value_entry.is_type else value
            if isinstance(name, (str, bool, type(None))) and name in value_entry.values:
                findings.append(_value_finding(path, name, value_entry, is_mapping=isinstance(value, dict)))
                parent.pop(path[-1])
    return Screened(data=data, findings=findings)


def _matches(data: Any, pattern: tuple[str, ...], path: Path = ()) -> Iterator[Path]:
    """The given paths that fit a pattern, in which "*" stands for any entry of a list or mapping."""
    if not pattern:
        yield path
        return
    head, *rest = pattern
    if head == "*" and isinstance(data, list):
        for index, entry in enumerate(data):
            yield from _matches(entry, tuple(rest), (*path, index))
    elif head == "*" and isinstance(data, dict):
        for name, entry in data.items():
            yield from _matches(entry, tuple(rest), (*path, name))
    elif isinstance(data, dict) and head in data:
        yield from _matches(data[head], tuple(rest), (*path, head))


def _is_off(value: Any, entry: UnsupportedKey) -> bool:
    if isinstance(value, dict) and entry.off_when_empty:
        return all(item in (None, 0, {}) for item in value.values())
    return value is None or any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in entry.off)


def _key_finding(path: Path, entry: UnsupportedKey) -> Finding:
    return Finding(
        paths=(path,),
        what=f"{dotted(path)} is not supported yet ({entry.about})",
        fix=entry.instead or "remove it",
        kind="unknown",
    )


def _value_finding(path: Path, name: Any, entry: UnsupportedValue, *, is_mapping: bool) -> Finding:
    key = (*path, "type") if is_mapping else path
    shown = {True: "true", False: "false", None: "null"}.get(name, name)
    return Finding(
        paths=(key,),
        what=f"{dotted(key)}: {shown} is not supported yet",
        expected=entry.expected,
        fix=entry.instead,
        kind="value",
    )


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
