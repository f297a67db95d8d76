"""Where each key of a configuration stands, so that a message can name the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place to name, and its rank in reading order."""

    where: str  # "config.yaml:7"; empty where the dotted key itself is the place
    order: tuple[int, int]
    is_override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A configuration as plain dicts, lists and scalars, with the places of its keys."""

    name: str  # the file as the user typed it, or "configuration"
    data: dict[str, Any]
    places: Mapping[Path, Place] = field(default_factory=dict)
    has_lines: bool = True  # False for a mapping: its places are the dotted keys

    def place(self, path: Path) -> Place:
        """The place of the key, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found if found.where else replace(found, where=dotted(path))
        return Place(where=self.name if self.has_lines else dotted(path), order=(-1, 0))


def dotted(path: Path) -> str:
    """`trainer.epochs`, `input_features.0.name`."""
    return ".".join(str(part) for part in path)


def value_at(data: Any, path: Path) -> Any:
    """The value at a path; None where there is none."""
    for part in path:
        if not _holds(data, part):
            return None
        data = data[part]
    return data


def contains(data: Any, path: Path) -> bool:
    """Whether the path is given, if only as null."""
    return bool(path) and _holds(value_at(data, path[:-1]), path[-1])


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, dict):
        return part in data
    return isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data)
