"""Read csv and tsv so that what stands in the file is what the model sees.

Cells are text, verbatim. A column becomes a number column only where writing the numbers again gives the file's text
back ("007" and "1.10" stay text). An empty cell is missing; "NaN", "NULL" and "NA" are so in columns of numbers, and
words elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from brim.data.csv_columns import ColumnKind, convert, refine
from brim.data.csv_form import CsvForm, csv_form, notes_on_form
from brim.data.csv_records import Header, ends_in_open_quote, first_lines, judged_rows, read_header
from brim.data.csv_swallowed import notes_on_swallowed
from brim.data.hidden_columns import FAULT
from brim.data.row_faults import is_majority
from brim.data.source import Source, source_of
from brim.data.spill import gather, kept_or
from brim.data.unreadable import Faulty, Unreadable
from brim.data.utf8 import first_bad_byte, require_marked, require_utf8
from brim.errors import DataError, Problem

BLOCK_BYTES = 8 * 2**20  # parsed at a time; doubled while a single row is longer
_MOST_BLOCK_BYTES = 2**30
_BATCH_ROWS = 4096  # where rows are parsed one by one


def read_csv(path: Path, *, separator: str) -> Source:
    """A delimited text file with a header line. A line that is no row is a row with a fault.

    separator: the sign between fields that the ending says; the file may show another, which is noted.
    Raises DataError where the file is of another kind, or where it cannot be told which lines are rows.
    """
    form = csv_form(path, usual=separator)
    header = read_header(path, form)
    table = kept_or(partial(_read_table, path, header, form), path)
    source = source_of(table, name=path.name, locate=_locator(path, form))
    if form.is_utf8 and is_majority(source.faults, table.num_rows):
        require_utf8(path)  # tells best why nothing can be read
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
        them = f"column {empty[0]} has" if len(empty) == 1 else f"columns {', '.join(empty)} have"
        notes.append(f"{source.name}: {them} neither a name nor a value, and {_IS[len(empty) == 1]} left out")
    if called:
        them = "a column without a name is" if len(called) == 1 else "columns without a name are"
        notes.append(f"{source.name}: {them} read: {', '.join(called)}")
    return notes


_IS = {True: "is", False: "are"}


def _read_table(path: Path, header: Header, form: CsvForm, keep_as: Path) -> pa.Table:
    if form.is_marked:
        require_marked(path, form.encoding)
    if form.is_marked or first_bad_byte(path, form.encoding) is None:
        try:
            return _read_whole(path, header, form, keep_as)
        except Faulty:
            pass
    return _read_row_by_row(path, header, form, keep_as)


def _read_whole(path: Path, header: Header, form: CsvForm, keep_as: Path) -> pa.Table:
    """A file without faults. Raises Faulty where Arrow's parser does not take it, or reads it as what it is not."""
    block_bytes = BLOCK_BYTES
    while True:
        open_batches = partial(_text_batches, path, header, form, block_bytes)
        try:
            kinds, last = _kinds(open_batches(), path, form)
            if _ends_in_line_break(last) and ends_in_open_quote(path, form):
                raise Faulty
            schema = pa.schema(_fields(header, kinds))
            converted = (_converted(batch, kinds, schema) for batch in open_batches())
            return gather(converted, schema=schema, keep_as=keep_as)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes >= _MOST_BLOCK_BYTES:
                raise Faulty from None
            block_bytes *= 2


def _text_batches(path: Path, header: Header, form: CsvForm, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """The file's rows, every cell as text."""
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
        yield from (batch.rename_columns(header.names) for batch in reader if batch.num_rows)


def _kinds(batches: Iterator[pa.RecordBatch], path: Path, form: CsvForm) -> tuple[list[ColumnKind], pa.RecordBatch]:
    """What each column is, from all of its cells; and the last batch."""
    kinds: list[ColumnKind] | None = None
    batch = None
    for batch in batches:
        kinds = kinds or [ColumnKind.EMPTY] * batch.num_columns
        kinds = [
            refine(kind, column, decimal_commas=form.has_decimal_commas)
            for kind, column in zip(kinds, batch.columns, strict=True)
        ]
    if batch is None or kinds is None:
        raise DataError(
            Problem(what="there is a header but no rows", where=path.name, expected="at least one row of data")
        )
    return kinds, batch


def _ends_in_line_break(last: pa.RecordBatch) -> bool:
    """Whether it may be that a quote is never closed: it swallows the rest of the file without complaint."""
    return any("\n" in (cell.as_py() or "") for cell in (column[-1] for column in last.columns))


def _fields(header: Header, kinds: list[ColumnKind]) -> list[pa.Field]:
    """The columns that are kept: all but those without a name and without a value, beside others."""
    fields = [kind.field(name) for name, kind in zip(header.names, kinds, strict=True)]
    unnamed = {name for _, name in header.unnamed}
    is_left_out = [name in unnamed and kind is ColumnKind.EMPTY for name, kind in zip(header.names, kinds, strict=True)]
    return fields if all(is_left_out) else [field for field, out in zip(fields, is_left_out, strict=True) if not out]


def _converted(batch: pa.RecordBatch, kinds: list[ColumnKind], schema: pa.Schema) -> pa.RecordBatch:
    """The columns of the schema, each as its kind."""
    kind_of = dict(zip(batch.schema.names, kinds, strict=True))
    columns = [convert(kind_of[name], batch[name]) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _read_row_by_row(path: Path, header: Header, form: CsvForm, keep_as: Path) -> pa.Table:
    """A file with faults: the last column says what is wrong with a row, whose cells are missing then."""
    open_batches = partial(_judged_batches, path, header, form)
    kinds, _ = _kinds((batch.select(header.names) for batch in open_batches()), path, form)
    schema = pa.schema([*_fields(header, kinds), (FAULT, pa.string())])
    converted = (_converted(batch, [*kinds, ColumnKind.TEXT], schema) for batch in open_batches())
    return gather(converted, schema=schema, keep_as=keep_as)


def _judged_batches(path: Path, header: Header, form: CsvForm) -> Iterator[pa.RecordBatch]:
    faulty = Unreadable(name=path.name, explain=partial(require_utf8, path) if form.is_utf8 else lambda: None)
    schema = pa.schema([(name, pa.string()) for name in (*header.names, FAULT)])
    rows = enumerate(judged_rows(path, form, num_cells=len(header.names)))
    while block := list(islice(rows, _BATCH_ROWS)):
        cells: list[list[str | None]] = []
        for row, (record, problem) in block:
            if problem is None:
                cells.append([*record.cells, None])
            else:
                fault = faulty.fault(row, problem, where=f"{path.name}:{record.line}")
                cells.append([*[None] * len(header.names), fault])
        columns = [pa.array(column, type=pa.string()) for column in zip(*cells, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _locator(path: Path, form: CsvForm) -> Callable[[int], str]:
    """Places as file:line. A cell may hold line breaks, so the lines are looked up in the file, at the first need."""

    @lru_cache(maxsize=1)
    def lines() -> Sequence[int]:
        return first_lines(path, form)

    return lambda row: f"{path.name}:{lines()[row]}"
