"""Read csv and tsv so that what stands in the file is what the model sees.

Cells are text, verbatim. A column becomes a number column only where writing the numbers again gives the file's text
back ("007" and "1.10" stay text). A csv column holds whole numbers, numbers, numbers in a form of their own, or text.
An empty cell is missing in each of them: csv has no other way of saying so. "NaN", "NULL" and "NA" are missing in
columns of numbers, and words elsewhere.

Records are read one by one only for places in messages and for files that Arrow's parser refuses: that is slow and
exact. A note points out rows that have gone into a cell: a quote that is left open is closed by the next one, lines
further down.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from brim.data.read.encoding import (
    ESCAPED_NUL,
    CsvForm,
    UndecodableText,
    csv_form,
    first_bad_byte,
    long_fields,
    notes_on_form,
    require_marked,
    require_utf8,
)
from brim.data.read.ledger import Unreadable, is_majority
from brim.data.read.source import DECIMAL_COMMA, MAX_PLACES, Source, line_number, require_distinct, source_of
from brim.data.read.spill import Faults, gather, kept_or
from brim.errors import DataError, Problem
from brim.notes import warning
from brim.units import format_count

BLOCK_BYTES = 2**20  # parsed at a time, of which Arrow reads 32 ahead; doubled while a single row is longer


_MOST_BLOCK_BYTES = 2**30


_BATCH_ROWS = 4096  # where rows are parsed one by one


def read_csv(path: Path, *, separator: str) -> Source:
    """Read a delimited text file with a header line. A line that cannot be read as a row is a row with a fault.

    separator: the sign between fields that the ending says; the file may show another, which is noted.
    Raises DataError where the file is of another kind, or where it is uncertain which lines are rows.
    """
    form = csv_form(path, usual=separator)
    header = read_header(path, form)
    table, faults = kept_or(partial(_read_table, path, header, form), path)
    # Without the header. A cell may hold line breaks.
    locate = line_number(path.name, lambda: (record.line for record in islice(_records(path, form), 1, None)))
    source = source_of(table, name=path.name, locate=locate, faults=faults)
    if form.is_utf8 and is_majority(source.faults, table.num_rows):
        require_utf8(path)  # explains best why nothing can be read
    notes = (
        *notes_on_form(path, form, usual=separator),
        *_notes_on_unnamed(header, source),
        *notes_on_swallowed(source, form.separator),
    )
    return replace(source, notes=notes)


def _notes_on_unnamed(header: Header, source: Source) -> list[str]:
    """Say what became of columns without a name in the header: a spreadsheet writes empty ones that were once used."""
    is_read = {name: name in source.table.column_names for _, name in header.unnamed}
    empty = [f"{number:,}" for number, name in header.unnamed if not is_read[name]]
    called = [f"column {number:,} as `{name}`" for number, name in header.unnamed if is_read[name]]
    notes = []
    if empty:
        them, are = (f"column {empty[0]} has", "is") if len(empty) == 1 else (f"columns {', '.join(empty)} have", "are")
        notes.append(f"{source.name}: {them} neither a name nor a value, and {are} left out")
    if called:
        them = "a column without a name is" if len(called) == 1 else "columns without a name are"
        notes.append(f"{source.name}: {them} read: {', '.join(called)}")
    return notes


Batches = Callable[[], Iterator[pa.RecordBatch]]  # the file's rows from the beginning, every cell as text


def _read_table(path: Path, header: Header, form: CsvForm, keep_as: Path, faults: Faults) -> pa.Table:
    """Read by Arrow's parser, and row by row what it does not take or reads as what it is not."""
    if form.is_marked:
        require_marked(path, form.encoding)
    is_text = form.is_marked or first_bad_byte(path, form.encoding) is None
    block_bytes = BLOCK_BYTES
    while is_text and block_bytes <= _MOST_BLOCK_BYTES:
        try:
            return _typed(
                partial(_parsed_batches, path, header, form, block_bytes), path, header, form, keep_as, faults
            )
        except _OpenQuote:
            break
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                break
            block_bytes *= 2
    return _typed(partial(_judged_batches, path, header, form, faults), path, header, form, keep_as, faults)


class _OpenQuote(Exception):
    """Signal that an unclosed quote has swallowed the rest of the file, which Arrow's parser does not report."""


def _parsed_batches(path: Path, header: Header, form: CsvForm, block_bytes: int) -> Iterator[pa.RecordBatch]:
    last = None
    with pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(
            block_size=block_bytes, skip_rows=form.num_lines_before, encoding="utf8" if form.is_utf8 else form.encoding
        ),
        parse_options=pa_csv.ParseOptions(delimiter=form.separator, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types={name: pa.string() for name in header.written}, strings_can_be_null=False
        ),
    ) as reader:
        assert reader.schema.names == header.written, "both parsers read the same header"
        for batch in reader:
            if batch.num_rows:
                last = batch
                yield batch.rename_columns(header.names)
    may_be_open = last is not None and any("\n" in (column[-1].as_py() or "") for column in last.columns)
    if may_be_open and ends_in_open_quote(path, form):
        raise _OpenQuote


def _judged_batches(path: Path, header: Header, form: CsvForm, faults: Faults) -> Iterator[pa.RecordBatch]:
    """Give the rows of a file with faults: the cells of a row that has one are missing."""
    explain = partial(require_utf8, path) if form.is_utf8 else lambda: None
    unreadable = Unreadable(name=path.name, problems=faults, explain=explain)
    rows = enumerate(judged_rows(path, form, num_cells=len(header.names)))
    while block := list(islice(rows, _BATCH_ROWS)):
        cells: list[list[str | None]] = []
        for row, (record, problem) in block:
            if problem is not None:
                unreadable.add(row, problem, where=f"{path.name}:{record.line}")
            cells.append([*record.cells] if problem is None else [None] * len(header.names))
        columns = [pa.array(column, type=pa.string()) for column in zip(*cells, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names=header.names)


def _typed(batches: Batches, path: Path, header: Header, form: CsvForm, keep_as: Path, faults: Faults) -> pa.Table:
    """Return the rows with each column as its kind, which all of its cells decide, so that they are gone through twice.

    A column without a name and without a value is left out beside others.
    """
    kinds = [ColumnKind.EMPTY] * len(header.names)
    num_rows = 0
    for batch in batches():
        num_rows += batch.num_rows
        kinds = [
            refine(kind, column, decimal_commas=form.has_decimal_commas)
            for kind, column in zip(kinds, batch.columns, strict=True)
        ]
    if not num_rows:
        raise DataError(what="there is a header but no rows", where=path.name, expected="at least one row of data")
    kind_of = dict(zip(header.names, kinds, strict=True))
    left_out = {name for _, name in header.unnamed if kind_of[name] is ColumnKind.EMPTY}
    names = [name for name in header.names if name not in left_out] or header.names
    schema = pa.schema([kind_of[name].field(name) for name in names])
    converted = (
        pa.RecordBatch.from_arrays([convert(kind_of[name], batch[name]) for name in names], schema=schema)
        for batch in batches()
    )
    return gather(converted, schema=schema, keep_as=keep_as, faults=faults)


_WITH_COMMA = r"^-?[0-9]+,[0-9]+$"


_MISSING_NUMBERS = ["", "nan", "NaN", "NAN", "null", "NULL", "Null", "NA", "N/A", "n/a", "<NA>", "None"]


class ColumnKind(Enum):
    """Ordered from the narrowest to the widest; a column is the widest of its parts."""

    EMPTY = 0  # no cell holds anything yet
    WHOLE = 1  # 64-bit whole numbers, written plainly
    NUMBER = 2  # numbers, written as Python writes them
    WRITTEN_NUMBER = 3  # numbers in another form (007, 1.10, 1e3), which are kept as they are written
    WITH_COMMAS = 4  # numbers with a decimal comma (1,5), which are kept as they are written
    TEXT = 5

    def field(self, name: str) -> pa.Field:
        """Return a column of this kind."""
        types = {ColumnKind.WHOLE: pa.int64(), ColumnKind.NUMBER: pa.float64()}
        metadata = {DECIMAL_COMMA: b""} if self is ColumnKind.WITH_COMMAS else None
        return pa.field(name, types.get(self, pa.string()), metadata=metadata)


def refine(kind: ColumnKind, cells: pa.Array, *, decimal_commas: bool = False) -> ColumnKind:
    """Return the kind of a column that holds these cells, too (text; missing in rows that cannot be read)."""
    if kind is ColumnKind.TEXT:
        return kind
    cells = cells.drop_null()
    filled = cells.filter(pc.invert(pc.is_in(cells, pa.array(_MISSING_NUMBERS))))
    here = _kind_of(filled, decimal_commas=decimal_commas)
    if {kind, here} == {ColumnKind.WHOLE, ColumnKind.NUMBER}:
        return ColumnKind.WRITTEN_NUMBER  # 3 beside 3.5: as a float it would be written 3.0
    if ColumnKind.WITH_COMMAS in (kind, here) and {kind, here} & {ColumnKind.NUMBER, ColumnKind.WRITTEN_NUMBER}:
        return ColumnKind.TEXT  # 1,5 beside 1.5
    return max(kind, here, key=lambda each: each.value)


def convert(kind: ColumnKind, cells: pa.Array) -> pa.Array:
    """Return the cells (text) as the column's kind."""
    is_text = kind in (ColumnKind.TEXT, ColumnKind.EMPTY)
    missing = pc.is_in(cells, pa.array([""] if is_text else _MISSING_NUMBERS))
    return pc.if_else(missing, pa.scalar(None, pa.string()), cells).cast(kind.field("").type)


def _kind_of(cells: pa.Array, *, decimal_commas: bool) -> ColumnKind:
    if len(cells) == 0:
        return ColumnKind.EMPTY
    if decimal_commas:
        has_comma = pc.match_substring_regex(cells, _WITH_COMMA)
        if pc.any(has_comma).as_py():
            others = _kind_of(cells.filter(pc.invert(has_comma)), decimal_commas=False)
            return ColumnKind.WITH_COMMAS if others in (ColumnKind.EMPTY, ColumnKind.WHOLE) else ColumnKind.TEXT
    whole = _cast(cells, pa.int64())
    if whole is not None:
        return ColumnKind.WHOLE if whole.cast(pa.string()).equals(cells) else ColumnKind.WRITTEN_NUMBER
    numbers = _cast(cells, pa.float64())
    if numbers is None:
        return ColumnKind.TEXT
    written = [repr(number) for number in numbers.to_pylist()]
    return ColumnKind.NUMBER if written == cells.to_pylist() else ColumnKind.WRITTEN_NUMBER


def _cast(cells: pa.Array, kind: pa.DataType) -> Any:
    try:
        return cells.cast(kind)
    except pa.ArrowInvalid:
        return None


_NEVER_ENDS = "unexpected end of data"  # as the csv module says it


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRecord:
    """Hold the cells that stand between two line ends."""

    line: int  # 1-based, on which it begins
    cells: list[str]
    text: str  # as the file has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Hold the column names of a csv file."""

    written: list[str]  # as the file has them
    names: list[str]  # the same, with one for each column that has none

    @property
    def unnamed(self) -> list[tuple[int, str]]:
        """Return the number (from 1) of each column without a name in the file, and the name that it is given."""
        pairs = enumerate(zip(self.written, self.names, strict=True), start=1)
        return [(number, name) for number, (written, name) in pairs if not written.strip()]


def read_header(path: Path, form: CsvForm) -> Header:
    """Read the column names; one that is blank becomes `Unnamed: 3`, as pandas calls the fourth column.

    Raises DataError when there are none, one stands twice or one is not text.
    """
    header = next(_records(path, form), None)
    if header is None:
        raise DataError(
            what="the file is empty", where=path.name, expected="a header line and at least one row of data"
        )
    names = header.cells
    undecodable = UndecodableText(path, form.encoding).problem_in(header.text)
    if undecodable is not None:
        if form.is_utf8:
            require_utf8(path)
        raise DataError(replace(undecodable, where=f"{path.name}:{header.line}"))
    written = [name for name in names if name.strip()]
    require_distinct(written, f"{path.name}:{header.line}", what="column names stand twice in the header")
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


def judged_rows(path: Path, form: CsvForm, *, num_cells: int) -> Iterator[tuple[CsvRecord, Problem | None]]:
    """Give each row with what is wrong with it, if anything is.

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
    """Return whether a quote is never closed, so that the last cell has swallowed the rest of the file."""
    last = deque(_records(path, form), maxlen=1)
    return any(_strict_error(record, form) == _NEVER_ENDS for record in last)


def _records(path: Path, form: CsvForm) -> Iterator[CsvRecord]:
    """Give each record, read as Arrow's parser reads it; empty lines are skipped."""
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
    """Return the error that a strict parser finds in a record."""
    with long_fields():
        try:
            list(csv.reader([record.text], delimiter=form.separator, strict=True))
        except csv.Error as error:
            return _NEVER_ENDS if _NEVER_ENDS in str(error) else str(error)
    return None


def _quote_problem(path: Path, record: CsvRecord, form: CsvForm) -> Problem | None:
    """Return what is wrong with a record's quotes.

    Raises DataError where the record runs over several lines: which of them are rows of their own is uncertain.
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
        what=f"{format_count(found, 'field')} where the header has {expected}",
        expected=format_count(expected, "field"),
        fix='put cells that hold commas, quotes or line breaks in "double quotes"' if found > expected else "",
    )


_FEWEST_LINES = 3  # within a cell, beside its first and last


def notes_on_swallowed(source: Source, delimiter: str) -> list[str]:
    """Return a note where each line within a cell would be a row of its own. A table in a cell may be one."""
    most = max(MAX_PLACES, source.table.num_rows // 10)  # where there are more, they are normal for this data
    found = list(islice(_swallowed(source.table, delimiter), most + 1))
    if not 0 < len(found) <= most:
        return []
    shown = ", ".join(f"{source.locate(row)} ({num_lines:,} of them)" for row, num_lines in found[:MAX_PLACES])
    more = f" and {len(found) - MAX_PLACES:,} more" if len(found) > MAX_PLACES else ""
    cells = format_count(len(found), "cell holds", "cells hold")
    note = (
        f"{cells} lines that look like rows of their own: "
        f'{shown}{more}; look whether a " was left open there: the next one closes it, and all between is one cell'
    )
    return [warning(note, topic="rows")]


def _swallowed(table: pa.Table, delimiter: str) -> Iterator[tuple[int, int]]:
    """Give the row of each such cell, and how many lines it holds that look like rows."""
    num_separators = table.num_columns - 1
    for column in table.columns if num_separators else []:
        if not pa.types.is_string(column.type):
            continue
        has_lines = pc.greater(pc.count_substring(column, "\n"), _FEWEST_LINES)
        has_fields = pc.greater_equal(pc.count_substring(column, delimiter), _FEWEST_LINES * num_separators)
        for row in pc.indices_nonzero(pc.and_(has_lines, has_fields)).to_pylist():
            lines = column[row].as_py().split("\n")[1:-1]
            if all(line.count(delimiter) == num_separators and all(line.split(delimiter)) for line in lines):
                yield row, len(lines)
