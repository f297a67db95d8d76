"""Describe one piece of advice: what was found, in which rows, why it matters and what to do.

`histogram` shows how lengths are spread, in a few bins with round edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.data.read import MAX_PLACES, Source

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


_MOST_BINS = 8


_WIDE_SPREAD = 8  # times the shortest length: beyond it, each bin is twice as wide as the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """How many rows have a length from `first` to `last`, both included."""

    first: int
    last: int
    num_rows: int


def histogram(lengths: npt.NDArray[np.int64]) -> tuple[Bin, ...]:
    """At most eight bins, without gaps, from the shortest to the longest; none for no lengths."""
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    starts = _doubling(shortest, longest) if longest > _WIDE_SPREAD * max(shortest, 1) else _even(shortest, longest)
    counts, _ = np.histogram(lengths, bins=[*starts, longest + 1])
    ends = [*(start - 1 for start in starts[1:]), longest]
    bins = zip(starts, ends, counts.tolist(), strict=True)
    return tuple(Bin(first=first, last=last, num_rows=num_rows) for first, last, num_rows in bins)


def _doubling(shortest: int, longest: int) -> list[int]:
    """… 129, 257, 513: starts of bins that end at powers of two; the first takes all that is shorter."""
    starts = [2**exponent + 1 for exponent in range(longest.bit_length()) if shortest < 2**exponent + 1 <= longest]
    return [shortest, *starts[1 - _MOST_BINS :]]


def _even(shortest: int, longest: int) -> list[int]:
    """Starts of equally wide bins, of the smallest of the widths 1, 2, 5, 10, 20, 50, … that make few enough."""
    widths = (digit * 10**exponent for exponent in count() for digit in (1, 2, 5))
    width = next(width for width in widths if longest // width - shortest // width < _MOST_BINS)
    return list(range(shortest // width * width, longest + 1, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """A label of a few rows that is probably another's, of many rows, by a slip of the keyboard."""

    label: str
    meant: str
    rows: list[int]
    num_meant: int  # rows
