"""Spellings that are accepted with a note: Ludwig's names for what brim calls otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from brim.config.places import Document, Path, contains, dotted, value_at
from brim.config.schema_walk import short_forms

_RENAMED: tuple[tuple[Path, str], ...] = (
    (("trainer", "learning_rate_scheduler", "wsd_decay_fraction"), "decay_fraction"),
)


def modernise(document: Document) -> tuple[Document, tuple[str, ...]]:
    """The document in brim's spelling, and a note for each change; bare texts are written out (`{type: lora}`)."""
    notes = []
    document = replace(document, data=_expanded(document.data, ()))
    for old, name in _RENAMED:
        new = (*old[:-1], name)
        if contains(document.data, old) and not contains(document.data, new):
            document = _renamed(document, old, new)
            notes.append(f"{document.place(old).where}: {dotted(old)} is read as {dotted(new)}")
    if "ludwig_version" in document.data:
        notes.append(f"{document.place(('ludwig_version',)).where}: ludwig_version has no effect")
        document = replace(document, data={k: v for k, v in document.data.items() if k != "ludwig_version"})
    return document, tuple(notes)


def _renamed(document: Document, old: Path, new: Path) -> Document:
    data = _rename(document.data, old, str(new[-1]))
    places = dict(document.places)
    if old in places:
        places[new] = places[old]
    return replace(document, data=data, places=places)


def _expanded(value: Any, pattern: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(item, (*pattern, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, (*pattern, "*")) for item in value]
    name = short_forms().get(pattern) if isinstance(value, str) else None
    return value if name is None else {name: value}


def _rename(data: Any, path: Path, name: str) -> Any:
    if len(path) == 1:
        return {name if key == path[0] else key: value for key, value in data.items()}
    return {**data, str(path[0]): _rename(value_at(data, path[:1]), path[1:], name)}
