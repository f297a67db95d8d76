"""What is wrong with a configuration, before it is known where that stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from brim.config.places import Document, Path
from brim.config.wording import line
from brim.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with the keys at `paths`. Its place is the first that an override or the file gave."""

    paths: tuple[Path, ...]
    what: str
    expected: str = ""
    fix: str = ""
    kind: Literal["unknown", "missing", "value", "type", "rule"] = "rule"
    meant: str = ""  # the key of the same section that an unknown key surely stands for
    instead: tuple[tuple[str, Any], ...] = ()  # dotted keys to write, with their values
    is_idle: bool = False  # it asks for nothing, which is told in a note

    @property
    def path(self) -> Path:
        return self.paths[0]


def to_problems(findings: Iterable[Finding], document: Document) -> list[Problem]:
    """The findings with their places, in the order of the file; overrides come last."""
    placed = []
    for finding in findings:
        given = [path for path in finding.paths if path in document.places]
        given.sort(key=lambda path: not document.places[path].is_override)
        place = document.place(given[0] if given else finding.path)
        fix = _with_lines(finding, as_override=place.is_override)
        problem = Problem(what=finding.what, where=place.where, expected=finding.expected, fix=fix)
        placed.append((place.order, problem))
    return [problem for _, problem in sorted(placed, key=lambda item: item[0])]


def _with_lines(finding: Finding, *, as_override: bool) -> str:
    """What to do, with the very text to write: in the file, or on the command line."""
    if not finding.instead:
        return finding.fix
    texts = [line(key, value, as_override=as_override) for key, value in finding.instead]
    return f"write {' and '.join(texts)}" + (f" ({finding.fix})" if finding.fix else "")


def is_within(path: Path, others: Iterable[Path]) -> bool:
    """Whether the path is one of the others, or lies below one."""
    return any(path[: len(other)] == other for other in others)
