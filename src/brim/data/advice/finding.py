"""One piece of advice: what was found, in which rows, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.data.source import MAX_PLACES, Source

Keys = npt.NDArray[np.int64]

MAX_ROWS = 10_000  # row numbers of a finding in JSON; the count is always there
ORDER = (  # from the most to the least important
    "no_room",
    "leakage",
    "no_end",
    "misspelt_label",
    "one_prompt",
    "different_answers",
    "no_separator",
    "cut_prompt",
    "cut_answer",
    "end_in_text",
    "unfinished",
    "duplicates",
    "answer_in_prompt",
    "one_answer",
    "broken_characters",
    "nearly_the_same",
    "space_at_end",
    "small_split",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """Advice about some rows, or about a whole split where `rows` is empty."""

    kind: str  # one of ORDER
    what: str
    why: str
    fix: str
    rows: Keys  # 0-based row numbers in the source
    like: Keys | None = None  # for each of `rows`, the row that it repeats
    places: tuple[str, ...] = ()  # where the first of `rows` stand

    @property
    def num_places(self) -> int:
        """Rows that have a place of their own: all but those that others repeat."""
        return len(self.rows) if self.like is None else int(np.count_nonzero(self.rows != self.like))

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "kind": self.kind,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "num_rows": len(self.rows),
            "rows": self.rows[:MAX_ROWS].tolist(),
            "like": None if self.like is None else self.like[:MAX_ROWS].tolist(),
            "places": list(self.places),
        }


def in_order(findings: list[Finding], source: Source) -> tuple[Finding, ...]:
    """The most important first, each with the places of its first rows."""
    ordered = sorted(findings, key=lambda finding: ORDER.index(finding.kind))
    return tuple(replace(finding, places=_places(finding, source)) for finding in ordered)


def _places(finding: Finding, source: Source) -> tuple[str, ...]:
    if finding.like is None:
        return tuple(map(source.locate, finding.rows[:MAX_PLACES].tolist()))
    others = np.flatnonzero(finding.rows != finding.like)[:MAX_PLACES]
    pairs = zip(finding.rows[others].tolist(), finding.like[others].tolist(), strict=True)
    return tuple(f"{source.locate(row)} (as {source.locate(like)})" for row, like in pairs)


def share(part: int, whole: int, noun: str = "rows") -> str:
    """ "3 of 40 rows (7.5%)" """
    return f"{part:,} of {whole:,} {noun} ({percent(part / max(whole, 1))})"


def percent(part: float) -> str:
    """ "7.5%", and "under 0.1%" for what would be written as 0.0%."""
    return "under 0.1%" if 0 < part < 0.0005 else f"{part:.1%}"
