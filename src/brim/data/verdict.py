"""What is said about the rows once all are tokenized: errors and notes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from brim.data.ledger import Entry
from brim.data.rows import TokenRows
from brim.data.source import MAX_PLACES, Source, places
from brim.data.tokenize import Findings, Limits
from brim.errors import DataError, Problem

_FIX_LENGTH = "set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted)"
_FIX_FEATURE_LENGTH = "set max_sequence_length of a feature to cut prompts or answers alone"


def require_fitting(findings: Findings, source: Source, limits: Limits, *, num_rows: int) -> None:
    """Raise DataError when rows are longer than the context, naming the longest."""
    if not findings.overlong:
        return
    longest = sorted(findings.overlong, key=lambda each: (-each[1], each[0]))
    located = ", ".join(f"{source.locate(key)} ({tokens:,} tokens)" for key, tokens in longest[:MAX_PLACES])
    more = f" and {len(longest) - MAX_PLACES:,} more" if len(longest) > MAX_PLACES else ""
    raise DataError(
        Problem(
            what=f"{len(longest):,} of {num_rows:,} rows are longer than the model's context",
            where=f"{located}{more}",
            expected=f"at most {limits.context_length:,} tokens of prompt, answer and end of sequence",
            fix=_FIX_LENGTH if findings.are_chats else f"{_FIX_LENGTH}; or {_FIX_FEATURE_LENGTH}",
        )
    )


def without_overlong(rows: TokenRows, findings: Findings, limits: Limits, split_of: Callable[[int], str]) -> TokenRows:
    """The rows that fit the context; those that do not are no findings any more, but entries of the ledger."""
    assert limits.context_length is not None or not findings.overlong
    why = f"preprocessing.on_overlong is drop, and the context is {limits.context_length or 0:,} tokens"
    findings.entries += [
        Entry(key=key, split=split_of(key), event="dropped_overlong", why=why, tokens_before=tokens, tokens_after=0)
        for key, tokens in findings.overlong
    ]
    kept = np.flatnonzero(~np.isin(rows.keys, [key for key, _ in findings.overlong]))
    findings.overlong.clear()
    return rows.take(kept)


def require_learnable(findings: Findings, source: Source, *, num_rows: int) -> None:
    """Raise DataError when rows have no supervised token."""
    if not findings.unlearnable:
        return
    raise DataError(
        Problem(
            what=f"{len(findings.unlearnable):,} of {num_rows:,} rows have nothing to learn from: "
            "no token of the answer is left",
            where=places(source, findings.unlearnable),
            expected="at least one token of the answer after all cuts",
            fix="raise the lengths, shorten the prompts, or set preprocessing.drop_unlearnable: true",
        )
    )


def notes_of(findings: Findings, source: Source, limits: Limits) -> list[str]:
    """What a person should know about the rows, though nothing is wrong."""
    notes = []
    if limits.joined is not None and "the model's context" in limits.joined.why:
        notes.append(f"{limits.joined.why}: rows are cut at {limits.joined.num_tokens:,} tokens")
    if findings.empty:
        notes.append(
            f"the answer of {_rows(len(findings.empty))} is empty, so that the model learns to end at once: "
            f"{places(source, findings.empty)} (an empty text, as csv has it, is no missing value)"
        )
    if findings.otherwise:
        notes.append(
            f"the tokens of {_rows(len(findings.otherwise))} are others where the text is encoded at once, not in the "
            "pieces of prompt and answer: programs that do so give the model somewhat other prompts than it learned "
            f"from: {places(source, findings.otherwise)}"
        )
    if findings.special:
        notes.append(
            f"the text of {_rows(len(findings.special))} spells out special tokens (such as </s>), which the model "
            f"reads as those tokens: {places(source, findings.special)}"
        )
    if findings.doubled_bos:
        notes.append(
            f"the prompt of {_rows(findings.doubled_bos)} begins with the beginning-of-sequence token twice: "
            "the text has it and the tokenizer adds it"
        )
    return notes


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
