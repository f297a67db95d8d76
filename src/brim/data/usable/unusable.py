"""Decide about rows that cannot be used: they are an error with their places, or left out and in the ledger.

All kinds are judged together: cells that cannot be read, missing values, rows beyond the context, and rows that hold
nothing to learn from. Under `auto` they are left out where they are few.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from brim.config.schema import PreprocessingConfig
from brim.data.read import Entry, Ledger, RowFaults, Source
from brim.data.tokens import Findings, Limits, Texts, TokenRows
from brim.data.usable.rows import Column, Keys, most_unasked
from brim.errors import DataError, Problem

_FIX_LENGTH = "set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted)"


_FIX_FEATURE_LENGTH = "set max_sequence_length of a feature to cut prompts or answers alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """Decide whether `auto` leaves out the rows that cannot be used."""

    most: int  # rows that may be left out so
    num_more: int  # of these, how many are not yet; negative where there are too many
    why: str  # the setting that leaves them out; empty where there are too many


def few_of(bad: Collection[int], findings: Findings, policy: PreprocessingConfig, *, num_rows: int) -> Few:
    """Judge all kinds of unusable rows together. bad: keys of rows that cannot be used. num_rows: of all splits."""
    keys = {*(bad if policy.on_bad_row == "auto" else ())}
    keys |= {key for key, _ in findings.unlearnable} if policy.drop_unlearnable == "auto" else set()
    keys |= {key for key, _ in findings.overlong} if policy.on_overlong == "auto" else set()
    most = most_unasked(policy, num_rows)
    if len(keys) > most:
        findings.most_dropped = most
    why = f"preprocessing.max_dropped_fraction {policy.max_dropped_fraction:g} leaves out up to {most:,}"
    return Few(most=most, num_more=most - len(keys), why=why if len(keys) <= most else "")


def require_fitting(findings: Findings, source: Source, limits: Limits, *, num_rows: int) -> None:
    """Raise DataError when rows are longer than the context, naming the longest."""
    if not findings.overlong:
        return
    longest = sorted(findings.overlong, key=lambda each: (-each[1], each[0]))
    raise DataError(
        what=f"{len(longest):,} of {num_rows:,} rows are longer than the model's context{_too_many(findings)}",
        where=source.places([key for key, _ in longest], [f" ({tokens:,} tokens)" for _, tokens in longest]),
        expected=f"at most {limits.context_length:,} tokens of prompt, answer and end of sequence",
        fix=_FIX_LENGTH if findings.are_chats else f"{_FIX_LENGTH}; or {_FIX_FEATURE_LENGTH}",
    )


def without_unusable(
    rows: TokenRows, findings: Findings, policy: PreprocessingConfig, source: Source, *, limits: Limits, few: str | None
) -> TokenRows:
    """Return the rows without those that `preprocessing` leaves out; these go from the findings to the ledger.

    Those are rows without anything to learn from, and rows that are longer than the context. few: the setting that
    leaves them out under `auto`, where the note names their places; None: they stay.
    """
    of_unlearnable = {True: "preprocessing.drop_unlearnable is true", "auto": few}.get(policy.drop_unlearnable)
    of_overlong = {"drop": "preprocessing.on_overlong is drop", "auto": few}.get(policy.on_overlong)
    context = f", and the context is {limits.context_length or 0:,} tokens"
    for event, found, why, more in (
        ("dropped_unlearnable", findings.unlearnable, of_unlearnable, ""),
        ("dropped_overlong", findings.overlong, of_overlong, context),
    ):
        if why is not None and found:
            place = source.locate if why == few else lambda key: ""
            rows = _drop(rows, event, found, why + more, findings=findings, place=place)
    return rows


def _drop(
    rows: TokenRows, event: str, found: list[tuple[int, int]], why: str, findings: Findings, place: Callable[[int], str]
) -> TokenRows:
    """Return the rows without those found, which go to the ledger. found: their keys and tokens."""
    entry = partial(Entry, event=event, why=why, tokens_after=0)
    findings.entries += [
        entry(key=key, split=findings.split_of(key), tokens_before=tokens, place=place(key)) for key, tokens in found
    ]
    keys = {key for key, _ in found}
    found.clear()
    findings.overlong[:] = [each for each in findings.overlong if each[0] not in keys]
    return rows.take(np.flatnonzero(~np.isin(rows.keys, list(keys))))


def require_learnable(findings: Findings, source: Source, *, num_rows: int) -> None:
    """Raise DataError when rows have no supervised token."""
    if not findings.unlearnable:
        return
    raise DataError(
        what=f"{len(findings.unlearnable):,} of {num_rows:,} rows have nothing to learn from: "
        f"no token of the answer is left{_too_many(findings)}",
        where=source.places([key for key, _ in findings.unlearnable]),
        expected="at least one token of the answer after all cuts",
        fix="raise the lengths, shorten the prompts, or set preprocessing.drop_unlearnable: true",
    )


def _too_many(findings: Findings) -> str:
    """Say how many of such rows would have been left out."""
    if not findings.most_dropped:
        return ""
    return f", more than the {findings.most_dropped:,} that preprocessing.max_dropped_fraction leaves out"


def bad_rows(
    faults: RowFaults,
    source: Source,
    policy: Literal["auto", "error", "drop"],
    few: Few,
    num_rows: int,
    split_of: Callable[[int], str],
) -> list[Entry]:
    """Return the ledger's entries for rows that cannot be used. Raises DataError where they are not to be left out.

    faults: of the rows' use; those of reading are the source's. num_rows: that were looked at.
    """
    of_source = RowFaults(locate=source.locate, problems=dict(source.faults))
    num_all = num_rows + len(source.faults)
    if policy == "error" or (policy == "auto" and not few.why):
        of_source.problems |= faults.problems
        return of_source.settle("error", num_rows=num_all, name=source.name, split_of=split_of, most=few.most)
    unasked = few.why if policy == "auto" else ""
    entries = of_source.settle(
        "drop", num_rows=source.table.num_rows, name=source.name, split_of=lambda key: None, unasked=unasked
    )
    return entries + faults.settle("drop", num_rows=num_rows, name=source.name, split_of=split_of, unasked=unasked)


def without_missing(
    source: Source, columns: Sequence[Column], keys: Keys, ledger: Ledger, split_of: Callable[[int], str]
) -> Keys:
    """Return the rows that stay where cells are missing; what is dropped or filled goes to the ledger."""
    dropped = np.zeros(source.table.num_rows, dtype=np.bool_)
    filled = np.zeros_like(dropped)
    empty = {column: source.missing(column.name, is_label=column.is_label) for column in columns}
    for column, rows in empty.items():
        (dropped if column.missing_value_strategy == "drop_row" else filled)[rows] = True
    for key in keys[(dropped | filled)[keys]].tolist():
        names = ", ".join(f"`{column.name}`" for column, rows in empty.items() if rows[key])
        event, why = "dropped_missing" if dropped[key] else "filled_missing", sys.intern(f"no value in {names}")
        ledger.entries.append(Entry(key=key, split=split_of(key), event=event, why=why))
    return keys[~dropped[keys]]


MAX_CHARACTERS = 1 << 24  # of a prompt or an answer; no model's context holds a tenth


def bounded(texts: Iterable[Texts], faults: RowFaults, *, most: int = MAX_CHARACTERS) -> Iterator[Texts]:
    """Give the texts without the rows that are too long; those are added to the faults."""

    def problem(batch: Texts, number: int) -> Problem | None:
        length = max(len(each[number]) for each in (batch.prompts, batch.answers) if each)
        what, expected = f"a text of {length:,} characters", f"at most {most:,} characters"
        return Problem(what=what, expected=expected, fix="cut it before, or remove the row") if length > most else None

    return without_faulty(texts, faults, problem)


def without_faulty(
    texts: Iterable[Texts], faults: RowFaults, problem_of: Callable[[Texts, int], Problem | None]
) -> Iterator[Texts]:
    """Give the texts without the rows that have a problem, which are added to the faults."""
    for batch in texts:
        keep = []
        for number, key in enumerate(batch.keys.tolist()):
            problem = problem_of(batch, number)
            if problem is None:
                keep.append(number)
            else:
                faults.add(key, problem)
        if keep:
            yield batch.only(keep)
