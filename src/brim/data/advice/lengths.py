"""Report what the length limits cut, and which length would keep how much.

Also reported are prompts that leave too little of the context for the answer: `predict` and `evaluate` refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brim.data.advice.finding import Finding, Keys, percent, share
from brim.data.read import Entry
from brim.data.tokens import TokenRows

Integers = npt.NDArray[np.int64]


_KEYS = {
    "cut_prompt": "input_features[0].preprocessing.max_sequence_length",
    "cut_answer": "output_features[0].preprocessing.max_sequence_length",
    "cut_joined": "preprocessing.global_max_sequence_length",
}


_PARTS = {"cut_prompt": "prompts", "cut_answer": "answers", "cut_joined": "rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one limit cuts. Lengths are in tokens, before that cut."""

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


def cuts(before: Mapping[str, Integers], entries: Iterable[Entry]) -> tuple[Cut, ...]:
    """Each limit that cut something. before: by event, the length of every row before that cut."""
    by_event: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.event in _KEYS:
            by_event.setdefault(entry.event, []).append(entry)
    return tuple(_cut(event, by_event[event], before[event]) for event in _KEYS if event in by_event)


def lengths_before(rows: Iterable[TokenRows], entries: Iterable[Entry], *, has_answers: bool) -> dict[str, Integers]:
    """By event, the length of every row before that cut, from the rows that stayed and what the ledger says."""
    cut: dict[str, dict[int, int]] = {event: {} for event in _KEYS}
    for entry in entries:
        if entry.event in cut and entry.tokens_before is not None:
            cut[entry.event][entry.key] = entry.tokens_before
    rows = list(rows)
    parts = [_before(each, cut, has_answers) for each in rows]
    there = np.concatenate([np.zeros(0, np.int64), *(each.keys for each in rows)])
    lengths = {}
    for event, of_rows in cut.items():
        keys, tokens = (np.fromiter(each, dtype=np.int64, count=len(of_rows)) for each in (of_rows, of_rows.values()))
        gone = tokens[~np.isin(keys, there)]
        lengths[event] = np.concatenate([*(part[event] for part in parts), gone])
    return lengths


def cut_findings(found: Iterable[Cut], entries: Iterable[Entry], *, context_length: int | None) -> list[Finding]:
    """Advice on each of these cuts."""
    keys: dict[str, list[int]] = {}
    for entry in entries:
        keys.setdefault(entry.event, []).append(entry.key)
    return [_finding(cut, np.asarray(keys[cut.event], dtype=np.int64), context_length) for cut in found]


def _before(rows: TokenRows, cut: Mapping[str, Mapping[int, int]], has_answers: bool) -> dict[str, Integers]:
    joined = _replaced(rows.lengths, rows.keys, cut["cut_joined"])
    prompt = rows.num_prompt_tokens
    answer = np.maximum(joined - prompt - has_answers, 0)  # EOS is no part of the answer's own length
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


_KINDS = {"cut_prompt": "cut_prompt", "cut_answer": "cut_answer", "cut_joined": "no_end"}


_WHY = {
    "cut_prompt": "a prompt loses its end, where the question and the template's last words stand",
    "cut_answer": "EOS comes after the cut, so that the model learns to stop in the middle",
    "cut_joined": "they have no end-of-sequence token: the model does not learn there when to stop",
}


def _finding(cut: Cut, rows: Integers, context_length: int | None) -> Finding:
    return Finding(
        kind=_KINDS[cut.event],
        what=f"{share(cut.num_rows, cut.num_all_rows, _PARTS[cut.event])} are cut at {cut.limit_tokens:,} tokens; "
        f"{percent(cut.share_of_tokens_lost)} of their tokens are lost",
        why=_WHY[cut.event],
        fix=_fix(cut, context_length),
        rows=rows,
    )


def _fix(cut: Cut, context_length: int | None) -> str:
    wanted = cut.keeps_99 if cut.keeps_99 > cut.limit_tokens else cut.keeps_all
    length = wanted if context_length is None else min(wanted, context_length)
    whole = f"(whole are 95% at {cut.keeps_95:,}, 99% at {cut.keeps_99:,}, all at {cut.keeps_all:,})"
    if length > cut.limit_tokens:
        return f"set {_KEYS[cut.event]}: {length} {whole}"
    return f"shorten these rows, or take them out: the model's context ends there {whole}"


def no_room(
    keys: Keys, lengths: npt.NDArray[np.int64], *, context_length: int, num_new: int, can_cut: bool
) -> list[Finding]:
    """Rows whose prompt is longer than the context less the tokens to be generated. The longest come first.

    lengths: tokens of each prompt. num_new: generation.max_new_tokens. can_cut: whether a key cuts prompts.
    """
    room = context_length - num_new
    too_long = np.flatnonzero(lengths > room)
    if not len(too_long):
        return []
    longest = too_long[np.argsort(-lengths[too_long], kind="stable")]
    return [
        Finding(
            kind="no_room",
            what=f"{share(len(longest), len(keys), 'prompts')} are too long: the model's context of "
            f"{context_length:,} tokens less generation.max_new_tokens {num_new:,} leaves {max(room, 0):,}, "
            f"the longest has {lengths[longest[0]]:,}",
            why="predict stops at such rows before it generates",
            fix="lower generation.max_new_tokens"
            + (f", or set input_features[0].preprocessing.max_sequence_length: {room}" if can_cut and room > 0 else ""),
            rows=keys[longest],
        )
    ]
