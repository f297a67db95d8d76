"""Where the records of a csv file stand and which of them are broken; slow and exact, for messages only."""

from __future__ import annotations

import csv
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from brim.errors import DataError, Problem

_MAX_PROBLEMS = 5


def read_header(path: Path, delimiter: str) -> list[str]:
    """The column names. Raises DataError when there are none or one stands twice."""
    line, names = next(_records(path, delimiter), (1, []))
    if not names:
        raise DataError(
            Problem(what="the file is empty", where=path.name, expected="a header line and at least one row of data")
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        listed = ", ".join(f"`{name}`" for name in twice)
        raise DataError(
            Problem(
                what=f"column names stand twice in the header: {listed}",
                where=f"{path.name}:{line}",
                expected="a name of its own for each column",
                fix="rename or remove one of them",
            )
        )
    return names


def first_lines(path: Path, delimiter: str) -> Sequence[int]:
    """The line (1-based) on which each row begins; the header is no row."""
    lines = array("q", (line for line, _ in _records(path, delimiter)))
    return lines[1:]


def find_problems(path: Path, delimiter: str) -> list[Problem]:
    """What is wrong with the records, the first few located and the others counted; empty when nothing is."""
    problems: list[Problem] = []
    num_more = 0
    expected: int | None = None
    line = 0
    try:
        for line, fields in _records(path, delimiter, strict=True):
            expected = expected or len(fields)
            if len(fields) == expected:
                continue
            if len(problems) < _MAX_PROBLEMS:
                problems.append(_ragged(path, line, len(fields), expected))
            else:
                num_more += 1
    except _BrokenQuote as broken:
        problems.append(_broken_quote(path, broken))
    if num_more:
        problems.append(Problem(what=f"{num_more:,} more lines have another number of fields", where=path.name))
    return problems


class _BrokenQuote(Exception):
    def __init__(self, first_line: int, last_line: int, message: str) -> None:
        super().__init__(message)
        self.first_line, self.last_line, self.message = first_line, last_line, message


def _records(path: Path, delimiter: str, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line on which it begins; empty lines are no records."""
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        reader = csv.reader(file, delimiter=delimiter, strict=strict)
        while True:
            first_line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _BrokenQuote(first_line, reader.line_num, str(error)) from None
            if fields:
                yield first_line, fields


@contextmanager
def _long_fields() -> Iterator[None]:
    """Cells may be of any length; the csv module's limit is the whole process's, so it is put back."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _ragged(path: Path, line: int, found: int, expected: int) -> Problem:
    return Problem(
        what=f"{found} {'field' if found == 1 else 'fields'} where the header has {expected}",
        where=f"{path.name}:{line}",
        expected=f"{expected} fields",
        fix='put cells that hold commas, quotes or line breaks in "double quotes"' if found > expected else "",
    )


def _broken_quote(path: Path, broken: _BrokenQuote) -> Problem:
    if "unexpected end of data" in broken.message:
        return Problem(
            what="a quoted cell begins in this row and never ends",
            where=f"{path.name}:{broken.first_line}",
            expected='a closing "',
            fix='close the quote; inside a quoted cell, write a quote twice: ""',
        )
    return Problem(
        what="text follows a closing quote",
        where=f"{path.name}:{broken.last_line}",
        expected="the separator or the end of the line",
        fix='inside a quoted cell, write a quote twice: ""',
    )
