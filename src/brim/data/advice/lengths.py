"""Report what the length limits cut, and which length would keep how much.

Also reported are prompts that leave too little of the context for the answer: `predict` and `evaluate` refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from brim.data.advice.finding import Bin, Finding, Integers, finding, histogram, percent, share
from brim.data.read import Entry
from brim.data.tokens import TokenRows


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
    cut = {
        event: {key: entry.tokens_before or 0 for key, entry in entries.items()} for event, entries in by_event.items()
    }
    parts = [_before(each, cut, has_answers) for each in splits]
    there = np.concatenate([np.zeros(0, np.int64), *(each.keys for each in splits)])
    lengths = {}
    for event, of_rows in cut.items():
        keys, tokens = (np.fromiter(each, dtype=np.int64, count=len(of_rows)) for each in (of_rows, of_rows.values()))
        lengths[event] = np.concatenate([*(part[event] for part in parts), tokens[~np.isin(keys, there)]])
    return lengths


def _before(rows: TokenRows, cut: Mapping[str, Mapping[int, int]], has_answers: bool) -> dict[str, Integers]:
    joined = _replaced(rows.lengths, rows.keys, cut["cut_joined"])
    prompt = rows.num_prompt_tokens
    answer = np.maximum(joined - prompt - has_answers, 0)  # EOS is not part of the answer's own length
    return {
        "cut_prompt": _replaced(prompt, rows.keys, cut["cut_prompt"]),
        "cut_answer": _replaced(answer, rows.keys, cut["cut_answer"]),
        "cut_joined": joined,
    }


def _replaced(lengths: Integers, keys: Integers, by_key: Mapping[int, int]) -> Integers:
    if not by_key:
        return lengths
    replaced: Integers = lengths.copy()
    for number in np.flatnonzero(np.isin(keys, list(by_key))).tolist():
        replaced[number] = by_key[int(keys[number])]
    return replaced


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
