"""Texts that are too long to tokenize: a tokenizer takes some hundred bytes of memory for each character."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from brim.data.row_faults import RowFaults
from brim.data.texts import Texts
from brim.errors import Problem

MAX_CHARACTERS = 1 << 24  # of a prompt or an answer; no model's context holds a tenth


def bounded(texts: Iterable[Texts], faults: RowFaults, *, most: int = MAX_CHARACTERS) -> Iterator[Texts]:
    """The texts without rows that are too long, which are added to the faults."""
    for batch in texts:
        keep = []
        for number, key in enumerate(batch.keys.tolist()):
            length = max(len(each[number]) for each in (batch.prompts, batch.answers) if each)
            if length <= most:
                keep.append(number)
            else:
                faults.add(key, _too_long(length, most))
        if keep:
            yield batch.only(keep)


def _too_long(length: int, most: int) -> Problem:
    return Problem(
        what=f"a text of {length:,} characters",
        expected=f"at most {most:,} characters",
        fix="cut it before, or remove the row",
    )
