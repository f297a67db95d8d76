"""The records of a csv file one by one: where each stands, and what is wrong with those that are no row.

Slow and exact: for places in messages, and for files that Arrow's parser refuses.
"""

from __future__ import annotations

import csv
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from brim.data.csv_form import CsvForm, long_fields
from brim.data.utf8 import ESCAPED_NUL, UndecodableText, require_utf8
from brim.errors import DataError, Problem

_NEVER_ENDS = "unexpected end of data"  # as the csv module says it


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRecord:
    """The cells that stand between two line ends."""

    line: int  # 1-based, on which it begins
    cells: list[str]
    text: str  # as the file has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The column names of a csv file."""

    written: list[str]  # as the file has them
    names: list[str]  # the same, with one for each column that has none

    @property
    def unnamed(self) -> list[tuple[int, str]]:
        """The number (from 1) of each column without a name in the file, and the name that it is given."""
        pairs = enumerate(zip(self.written, self.names, strict=True), start=1)
        return [(number, name) for number, (written, name) in pairs if not written.strip()]


def read_header(path: Path, form: CsvForm) -> Header:
    """Read the column names; one that is blank becomes `Unnamed: 3`, as pandas calls the fourth column.

    Raises DataError when there are none, one stands twice or one is no text.
    """
    header = next(_records(path, form), None)
    if header is None:
        raise DataError(
            Problem(what="the file is empty", where=path.name, expected="a header line and at least one row of data")
        )
    names = header.cells
    undecodable = UndecodableText(path, form.encoding).problem_in(header.text)
    if undecodable is not None:
        if form.is_utf8:
            require_utf8(path)
        raise DataError(replace(undecodable, where=f"{path.name}:{header.line}"))
    twice = sorted({name for name in names if name.strip() and names.count(name) > 1})
    if twice:
        listed = ", ".join(f"`{name}`" for name in twice)
        raise DataError(
            Problem(
                what=f"column names stand twice in the header: {listed}",
                where=f"{path.name}:{header.line}",
                expected="a name of its own for each column",
                fix="rename or remove one of them",
            )
        )
    return Header(written=names, names=_all_named(names))


def _all_named(names: list[str]) -> list[str]:
    taken = {name for name in names if name.strip()}
    named = []
    for number, name in enumerate(names):
        if not name.strip():
            name = f"Unnamed: {number}"
            while name in taken:
                name += ".1"
            taken.add(name)
        named.append(name)
    return named


def first_lines(path: Path, form: CsvForm) -> Sequence[int]:
    """The line (1-based) on which each row begins; the header is no row."""
    lines = array("q", (record.line for record in _records(path, form)))
    return lines[1:]


def judged_rows(path: Path, form: CsvForm, *, num_cells: int) -> Iterator[tuple[CsvRecord, Problem | None]]:
    """Each row with what is wrong with it, if anything is.

    Raises DataError where a quote that is not closed leaves open which lines are rows.
    """
    undecodable = UndecodableText(path, form.encoding)
    records = _records(path, form)
    next(records)  # the header
    record = next(records, None)
    while record is not None:
        following = next(records, None)
        problem = None
        if len(record.cells) != num_cells:
            problem = _quote_problem(path, record, form) or _ragged(len(record.cells), num_cells)
        elif following is None and _strict_error(record, form) == _NEVER_ENDS:
            problem = _quote_problem(path, record, form)
        yield record, undecodable.problem_in(record.text) or problem
        record = following


def ends_in_open_quote(path: Path, form: CsvForm) -> bool:
    """Whether a quote is never closed, so that the last cell has swallowed the rest of the file."""
    last = deque(_records(path, form), maxlen=1)
    return any(_strict_error(record, form) == _NEVER_ENDS for record in last)


def _records(path: Path, form: CsvForm) -> Iterator[CsvRecord]:
    """Each record, read as Arrow's parser reads it; empty lines are no records."""
    seen: list[str] = []

    def lines() -> Iterator[str]:
        for line in file:
            line = line.replace("\0", ESCAPED_NUL)
            seen.append(line)
            yield line

    encoding = "utf-8-sig" if form.is_utf8 else form.encoding
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file, long_fields():
        before = len(list(islice(file, form.num_lines_before)))
        reader = csv.reader(lines(), delimiter=form.separator)
        line = 1 + before
        for cells in reader:
            if cells:
                yield CsvRecord(line=line, cells=cells, text="".join(seen))
            seen.clear()
            line = before + reader.line_num + 1


def _strict_error(record: CsvRecord, form: CsvForm) -> str | None:
    """What a parser that forgives nothing says of a record."""
    with long_fields():
        try:
            list(csv.reader([record.text], delimiter=form.separator, strict=True))
        except csv.Error as error:
            return _NEVER_ENDS if _NEVER_ENDS in str(error) else str(error)
    return None


def _quote_problem(path: Path, record: CsvRecord, form: CsvForm) -> Problem | None:
    """What is wrong with a record's quotes.

    Raises DataError where the record runs over several lines: which of them are rows of their own cannot be told.
    """
    error = _strict_error(record, form)
    if error is None:
        return None
    if error == _NEVER_ENDS:
        problem = Problem(
            what="a quoted cell begins in this row and never ends",
            expected='a closing "',
            fix='close the quote; inside a quoted cell, write a quote twice: ""',
        )
    else:
        problem = Problem(
            what="text follows a closing quote",
            expected="the separator or the end of the line",
            fix='inside a quoted cell, write a quote twice: ""',
        )
    num_lines = len(record.text.rstrip("\r\n").replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    if num_lines > 1:
        what = f"{problem.what}; where the next row begins, in the {num_lines:,} lines that it takes, cannot be told"
        raise DataError(replace(problem, what=what, where=f"{path.name}:{record.line}"))
    return problem


def _ragged(found: int, expected: int) -> Problem:
    return Problem(
        what=f"{found} {'field' if found == 1 else 'fields'} where the header has {expected}",
        expected=f"{expected} fields",
        fix='put cells that hold commas, quotes or line breaks in "double quotes"' if found > expected else "",
    )
