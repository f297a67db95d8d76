"""Describe one piece of advice: what was found, in which rows, why it matters and what to do; advise about lengths.

What is always said of a kind of advice stands in one table. `histogram` shows how lengths are spread, in a few bins
with round edges. Length limits are reported by what they cut, and which length would keep how much; so are prompts that
leave too little of the context for the answer, which `predict` and `evaluate` refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.data.read import Entry, Source
from brim.data.tokens import TokenRows

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Describe what one limit cuts. Lengths are in tokens, before that cut."""

    event: str  # cut_prompt, cut_answer or cut_joined, as in the ledger
    limit_tokens: int
    why: str  # what sets the limit
    num_rows: int  # that it cuts
    num_all_rows: int
    num_tokens_lost: int
    share_of_tokens_lost: float  # of the tokens that it saw
    keeps_95: int  # the length that would leave 95% of the rows whole
    keeps_99: int
    keeps_all: int


_OF_EVENT = {  # the kind of advice, what is cut, the key that sets the length
    "cut_prompt": ("cut_prompt", "prompts", "input_features[0].preprocessing.max_sequence_length"),
    "cut_answer": ("cut_answer", "answers", "output_features[0].preprocessing.max_sequence_length"),
    "cut_joined": ("no_end", "rows", "preprocessing.global_max_sequence_length"),
}


def look_at_cuts(
    splits: Iterable[TokenRows], entries: Iterable[Entry], *, has_answers: bool, context_length: int | None
) -> tuple[tuple[Cut, ...], tuple[Bin, ...], list[Finding]]:
    """Return each limit that cut something, how long the rows were before they were cut as a whole, and advice.

    splits: the rows that stayed. entries: what the ledger says of these and the others.
    """
    by_event: dict[str, dict[int, Entry]] = {event: {} for event in _OF_EVENT}
    for entry in entries:
        if entry.event in by_event and entry.tokens_before is not None:
            by_event[entry.event][entry.key] = entry
    before = _lengths_before(list(splits), by_event, has_answers)
    made = {event: _cut(event, list(cut.values()), before[event]) for event, cut in by_event.items() if cut}
    advice = [
        _finding(cut, np.fromiter(by_event[event], dtype=np.int64), context_length) for event, cut in made.items()
    ]
    return tuple(made.values()), histogram(before["cut_joined"]), advice


def _lengths_before(
    splits: list[TokenRows], by_event: Mapping[str, Mapping[int, Entry]], has_answers: bool
) -> dict[str, Integers]:
    """Return by event the length of every row before that cut, those of rows that were dropped behind the others."""
    keys, joined, prompts = (
        np.concatenate(each) for each in zip(*((s.keys, s.lengths, s.num_prompt_tokens) for s in splits), strict=True)
    )
    joined = _before(joined, keys, by_event["cut_joined"])
    answers = np.maximum(joined[: len(keys)] - prompts - has_answers, 0)  # EOS is not part of the answer's own length
    return {
        "cut_prompt": _before(prompts, keys, by_event["cut_prompt"]),
        "cut_answer": _before(answers, keys, by_event["cut_answer"]),
        "cut_joined": joined,
    }


def _before(lengths: Integers, keys: Integers, cut: Mapping[int, Entry]) -> Integers:
    """Return the lengths of the rows with these keys as they were before they were cut, and those of rows that went."""
    before = {key: entry.tokens_before or 0 for key, entry in cut.items()}
    there = np.isin(keys, list(before))
    lengths = lengths.copy()
    lengths[there] = [before.pop(key) for key in keys[there].tolist()]
    return np.concatenate([lengths, np.fromiter(before.values(), dtype=np.int64)])


def _cut(event: str, entries: list[Entry], before: Integers) -> Cut:
    lost = sum((entry.tokens_before or 0) - (entry.tokens_after or 0) for entry in entries)
    keeps_95, keeps_99, keeps_all = np.quantile(before, [0.95, 0.99, 1.0], method="inverted_cdf").tolist()
    return Cut(
        event=event,
        limit_tokens=entries[0].tokens_after or 0,
        why=entries[0].why,
        num_rows=len(entries),
        num_all_rows=len(before),
        num_tokens_lost=lost,
        share_of_tokens_lost=lost / max(int(before.sum()), 1),
        keeps_95=keeps_95,
        keeps_99=keeps_99,
        keeps_all=keeps_all,
    )


def _finding(cut: Cut, rows: Integers, context_length: int | None) -> Finding:
    kind, part, key = _OF_EVENT[cut.event]
    wanted = cut.keeps_99 if cut.keeps_99 > cut.limit_tokens else cut.keeps_all
    length = wanted if context_length is None else min(wanted, context_length)
    is_way_out = length > cut.limit_tokens
    fix = (
        f"set {key}: {length}" if is_way_out else "shorten these rows, or take them out: the model's context ends there"
    )
    whole = f"(whole are 95% at {cut.keeps_95:,}, 99% at {cut.keeps_99:,}, all at {cut.keeps_all:,})"
    what = (
        f"{share(cut.num_rows, cut.num_all_rows, part)} are cut at {cut.limit_tokens:,} tokens; "
        f"{percent(cut.share_of_tokens_lost)} of their tokens are lost"
    )
    return finding(kind, what, rows, fix=f"{fix} {whole}")


def no_room(keys: Integers, lengths: Integers, *, context_length: int, num_new: int, can_cut: bool) -> list[Finding]:
    """Return the rows whose prompt is longer than the context less the tokens to be generated, the longest first.

    lengths: tokens of each prompt. num_new: generation.max_new_tokens. can_cut: whether a key cuts prompts.
    """
    room = context_length - num_new
    too_long = np.flatnonzero(lengths > room)
    if not len(too_long):
        return []
    longest = too_long[np.argsort(-lengths[too_long], kind="stable")]
    what = (
        f"{share(len(longest), len(keys), 'prompts')} are too long: the model's context of {context_length:,} tokens "
        f"less generation.max_new_tokens {num_new:,} leaves {max(room, 0):,}, the longest has {lengths[longest[0]]:,}"
    )
    cut = f", or set input_features[0].preprocessing.max_sequence_length: {room}" if can_cut and room > 0 else ""
    return [finding("no_room", what, keys[longest], cut=cut)]
