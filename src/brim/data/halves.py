"""Half characters: lone surrogates such as \\ud83d, which JSON and Python can write and which no text can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.data.as_text import text_of
from brim.data.hidden_columns import MARK
from brim.errors import Problem


def problem_of_record(record: Mapping[str, Any]) -> Problem | None:
    """What no table can hold of a JSON object: half a character in it, or a name that begins with NUL."""
    for name, cell in record.items():
        if name.startswith(MARK):
            return Problem(what="a column's name begins with the character NUL", fix="give the column another name")
        if not is_text(name) or not is_text(text_of(cell)):
            return _half(name)
    return None


def without_halves(name: str, values: Sequence[Any], faults: dict[int, Problem]) -> list[Any]:
    """The values, missing where one holds half a character; `faults` takes why."""
    whole = list(values)
    for row, value in enumerate(whole):
        if not is_text(text_of(value)):
            whole[row] = None
            faults.setdefault(row, _half(name))
    return whole


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _half(name: str) -> Problem:
    printable = name.encode(errors="backslashreplace").decode()
    return Problem(
        what=f"column `{printable}` holds half of a character (a lone surrogate such as \\ud83d), "
        "which no text can hold",
        fix="write the whole character, or remove it",
    )
