"""Describe one piece of advice: what was found, in which rows, why it matters and what to do.

What is always said of a kind of advice stands in one table. `histogram` shows how lengths are spread, in a few bins
with round edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.data.read import Source

Integers = npt.NDArray[np.int64]


MAX_PLACES = 5


MAX_ROWS = 10_000  # row numbers of a finding in JSON; the count is always there


BY_ROWS = "`brim check … --rows FILE` lists them"


_END = "the model learns to stop in the middle"


# From the most to the least important kind: why it matters, and what to do. Braces take what is known of the data.
ADVICE = {
    "no_room": ("predict stops at such rows before it generates", "lower generation.max_new_tokens{cut}"),
    "leakage": ("a model that has seen the answers scores better there than on new prompts", "{fix}"),
    "no_end": ("they have no end-of-sequence token: the model does not learn there when to stop", "{fix}"),
    "misspelt_label": (
        "it is learned, predicted and counted as a label of its own",
        "if {meant!r} is meant, write it so in these rows",
    ),
    "one_prompt": (
        "the answer cannot follow from such a prompt",
        "put the columns that decide the answer into prompt.template, as {{column}}",
    ),
    "different_answers": (
        "the model learns a mixture of the answers",
        "keep one answer a prompt, or add to the prompt what makes them differ",
    ),
    "no_separator": (
        "the model cannot tell where the prompt ends; fine where the answer is meant to continue its text",
        "{fix}",
    ),
    "cut_prompt": ("a prompt loses its end, where the question and the template's last words stand", "{fix}"),
    "cut_answer": (f"EOS comes after the cut, so that {_END}", "{fix}"),
    "end_in_text": ("{why}", "{fix}"),
    "unfinished": (f"{_END}{{of}}", "{fix}"),
    "duplicates": ("what is repeated weighs more, and is learned by heart", f"take them out; {BY_ROWS}"),
    "answer_in_prompt": (
        "the model learns to copy; fine where the task is to find a passage",
        "look at `brim check … --show 3`; take the column that holds the answer out of the prompt",
    ),
    "one_answer": (
        "a model that always writes it is right in {share:.1%} of the rows",
        "compare sequence_accuracy with this share, or balance the answers",
    ),
    "broken_characters": (
        "the model learns to write them",
        "read the original again with its own encoding and save it as UTF-8",
    ),
    "nearly_the_same": (
        "unless case or spacing decides the answer, the model learns a mixture",
        "look at some; write such prompts alike and keep one answer",
    ),
    "space_at_end": ("in the text that the model knows, the space belongs to the word after it", "{fix}"),
    "small_split": (
        "an accuracy from so few rows is uncertain by up to ±{uncertainty:.0%}",
        "give the split more rows (preprocessing.split)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """Hold advice about some rows, or about a whole split where `rows` is empty."""

    kind: str  # of ADVICE
    what: str
    why: str
    fix: str
    rows: Integers  # 0-based row numbers in the source
    like: Integers | None = None  # for each of `rows`, the row that it repeats
    places: tuple[str, ...] = ()  # where the first of `rows` stand

    @property
    def num_places(self) -> int:
        """Count the rows that have a place of their own: all but those that others repeat."""
        return len(self.rows) if self.like is None else int(np.count_nonzero(self.rows != self.like))

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as --json prints it."""
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


def finding(kind: str, what: str, rows: Integers, like: Integers | None = None, **known: Any) -> Finding:
    """Return advice of a kind. known: what the texts of its kind have braces for."""
    why, fix = (text.format(**known) for text in ADVICE[kind])
    return Finding(kind=kind, what=what, why=why, fix=fix, rows=rows, like=like)


def in_order(findings: list[Finding], source: Source) -> tuple[Finding, ...]:
    """Sort findings, the most important first, and give each the places of its first rows."""
    kinds = list(ADVICE)
    ordered = sorted(findings, key=lambda each: kinds.index(each.kind))
    return tuple(replace(each, places=_places(each, source)) for each in ordered)


def _places(found: Finding, source: Source) -> tuple[str, ...]:
    if found.like is None:
        return tuple(map(source.locate, found.rows[:MAX_PLACES].tolist()))
    others = np.flatnonzero(found.rows != found.like)[:MAX_PLACES]
    pairs = zip(found.rows[others].tolist(), found.like[others].tolist(), strict=True)
    return tuple(f"{source.locate(row)} (as {source.locate(like)})" for row, like in pairs)


def share(part: int, whole: int, noun: str = "rows") -> str:
    """Return "3 of 40 rows (7.5%)"."""
    return f"{part:,} of {whole:,} {noun} ({percent(part / max(whole, 1))})"


def percent(part: float) -> str:
    """Return "7.5%", and "under 0.1%" for what would be written as 0.0%."""
    return "under 0.1%" if 0 < part < 0.0005 else f"{part:.1%}"


_MOST_BINS = 8


_WIDE_SPREAD = 8  # times the shortest length: beyond it, each bin is twice as wide as the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Count the rows whose length is `first` to `last`, both included."""

    first: int
    last: int
    num_rows: int


def histogram(lengths: Integers) -> tuple[Bin, ...]:
    """Return at most eight bins, without gaps, from the shortest to the longest; none for no lengths."""
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    starts = _doubling(shortest, longest) if longest > _WIDE_SPREAD * max(shortest, 1) else _even(shortest, longest)
    counts, _ = np.histogram(lengths, bins=[*starts, longest + 1])
    ends = [*(start - 1 for start in starts[1:]), longest]
    bins = zip(starts, ends, counts.tolist(), strict=True)
    return tuple(Bin(first=first, last=last, num_rows=num_rows) for first, last, num_rows in bins)


def _doubling(shortest: int, longest: int) -> list[int]:
    """Return the starts of bins that end at powers of two (129, 257, 513); the first takes all that is shorter."""
    starts = [2**exponent + 1 for exponent in range(longest.bit_length()) if shortest < 2**exponent + 1 <= longest]
    return [shortest, *starts[1 - _MOST_BINS :]]


def _even(shortest: int, longest: int) -> list[int]:
    """Return the starts of equally wide bins, of the smallest width 1, 2, 5, 10, 20, … that makes few enough."""
    widths = (digit * 10**exponent for exponent in count() for digit in (1, 2, 5))
    width = next(width for width in widths if longest // width - shortest // width < _MOST_BINS)
    return list(range(shortest // width * width, longest + 1, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slip:
    """Hold a label of a few rows that is probably a misspelling of another, of many rows."""

    label: str
    meant: str
    rows: list[int]
    num_meant: int  # rows
