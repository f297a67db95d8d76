"""What is said about the rows once all are tokenized: errors and notes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from brim.config import PreprocessingConfig
from brim.data.ledger import Entry
from brim.data.rows import TokenRows
from brim.data.source import MAX_PLACES, Source, places
from brim.data.tokenize import Findings, Limits
from brim.data.usable import most_unasked
from brim.errors import DataError, Problem
from brim.notes import warning

_FIX_LENGTH = "set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted)"
_FIX_FEATURE_LENGTH = "set max_sequence_length of a feature to cut prompts or answers alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """Whether the rows are left out of which nobody says what becomes of them."""

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
    located = ", ".join(f"{source.locate(key)} ({tokens:,} tokens)" for key, tokens in longest[:MAX_PLACES])
    more = f" and {len(longest) - MAX_PLACES:,} more" if len(longest) > MAX_PLACES else ""
    raise DataError(
        Problem(
            what=f"{len(longest):,} of {num_rows:,} rows are longer than the model's context{_too_many(findings)}",
            where=f"{located}{more}",
            expected=f"at most {limits.context_length:,} tokens of prompt, answer and end of sequence",
            fix=_FIX_LENGTH if findings.are_chats else f"{_FIX_LENGTH}; or {_FIX_FEATURE_LENGTH}",
        )
    )


def without_unusable(
    rows: TokenRows,
    findings: Findings,
    policy: PreprocessingConfig,
    source: Source,
    *,
    limits: Limits,
    split_of: Callable[[int], str],
    few: str | None,
) -> TokenRows:
    """The rows without those that `preprocessing` leaves out; they are no findings any more, but in the ledger.

    Those are rows without anything to learn from, and rows that are longer than the context. few: the setting that
    leaves them out where nobody says what becomes of them; None: they stay.
    """
    drop = _Drop(findings=findings, source=source, split_of=split_of, unasked=few)
    of_unlearnable = {True: "preprocessing.drop_unlearnable is true", "auto": few}.get(policy.drop_unlearnable)
    rows = drop(rows, "dropped_unlearnable", findings.unlearnable, of_unlearnable)
    of_overlong = {"drop": "preprocessing.on_overlong is drop", "auto": few}.get(policy.on_overlong)
    context = f", and the context is {limits.context_length or 0:,} tokens"
    return drop(rows, "dropped_overlong", findings.overlong, of_overlong, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drop:
    """Takes rows out, and writes them down."""

    findings: Findings
    source: Source
    split_of: Callable[[int], str]
    unasked: str | None  # the reason with which nobody asked for it, so that places are told

    def __call__(
        self, rows: TokenRows, event: str, found: list[tuple[int, int]], why: str | None, more: str = ""
    ) -> TokenRows:
        """The rows that are left. found: key and tokens of those to drop. why: None: they stay, as findings."""
        if why is None or not found:
            return rows
        self.findings.entries += [
            Entry(
                key=key,
                split=self.split_of(key),
                event=event,
                why=why + more,
                tokens_before=tokens,
                tokens_after=0,
                place=self.source.locate(key) if why == self.unasked else "",
            )
            for key, tokens in found
        ]
        keys = {key for key, _ in found}
        found.clear()
        self.findings.overlong[:] = [each for each in self.findings.overlong if each[0] not in keys]
        return rows.take(np.flatnonzero(~np.isin(rows.keys, list(keys))))


def require_learnable(findings: Findings, source: Source, *, num_rows: int) -> None:
    """Raise DataError when rows have no supervised token."""
    if not findings.unlearnable:
        return
    raise DataError(
        Problem(
            what=f"{len(findings.unlearnable):,} of {num_rows:,} rows have nothing to learn from: "
            f"no token of the answer is left{_too_many(findings)}",
            where=places(source, [key for key, _ in findings.unlearnable]),
            expected="at least one token of the answer after all cuts",
            fix="raise the lengths, shorten the prompts, or set preprocessing.drop_unlearnable: true",
        )
    )


def _too_many(findings: Findings) -> str:
    """What of such rows would have been left out."""
    if not findings.most_dropped:
        return ""
    return f", more than the {findings.most_dropped:,} that preprocessing.max_dropped_fraction leaves out"


def notes_of(findings: Findings, source: Source, limits: Limits) -> list[str]:
    """What a person should know about the rows, though nothing is wrong."""
    notes: list[str] = []
    if limits.joined is not None and "the model's context" in limits.joined.why:
        notes.append(f"{limits.joined.why}: rows are cut at {limits.joined.num_tokens:,} tokens")
    if findings.empty:
        told = (
            f"the answer of {_rows(len(findings.empty))} is empty, so that the model learns to end at once: "
            f"{places(source, findings.empty)} (an empty text is no missing value)"
        )
        notes.append(warning(told, topic="rows", short=f"the answer of {_rows(len(findings.empty))} is empty"))
    if findings.otherwise:
        notes.append(
            f"the tokens of {_rows(len(findings.otherwise))} are others where the text is encoded at once, not in the "
            "pieces of prompt and answer: programs that do so give the model somewhat other prompts than it learned "
            f"from: {places(source, findings.otherwise)}"
        )
    if findings.special:
        short = f"the text of {_rows(len(findings.special))} spells out special tokens (such as </s>)"
        told = f"{short}, which the model reads as those tokens: {places(source, findings.special)}"
        notes.append(warning(told, topic="rows", short=short))
    if findings.doubled_bos:
        short = f"the prompt of {_rows(findings.doubled_bos)} begins with the beginning-of-sequence token twice"
        notes.append(warning(f"{short}: the text has it and the tokenizer adds it", topic="rows", short=short))
    return notes


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
