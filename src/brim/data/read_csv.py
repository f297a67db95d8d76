"""Read csv and tsv so that what stands in the file is what the model sees.

Cells are text, verbatim. A column becomes a number column only where writing the numbers again gives the file's text
back ("007" and "1.10" stay text); in columns of numbers, of either kind, an empty cell is missing, in others it is
the empty text. "NaN", "NULL" and "NA" are words in a text column.
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
from brim.data.csv_records import ends_in_open_quote, first_lines, judged_rows, read_header
from brim.data.csv_separator import require_separator
from brim.data.csv_swallowed import notes_on_swallowed
from brim.data.hidden_columns import FAULT
from brim.data.source import Source, source_of
from brim.data.spill import gather, kept_or
from brim.data.unreadable import Faulty, Unreadable
from brim.data.utf8 import first_bad_byte, require_utf8
from brim.errors import DataError, Problem

BLOCK_BYTES = 8 * 2**20  # parsed at a time; doubled while a single row is longer
_MOST_BLOCK_BYTES = 2**30
_BATCH_ROWS = 4096  # where rows are parsed one by one


def read_csv(path: Path, *, delimiter: str) -> Source:
    """A delimited text file with a header line. A line that is no row is a row with a fault.

    Raises DataError where the file is of another kind, or where it cannot be told which lines are rows.
    """
    names = read_header(path, delimiter)
    require_separator(path, names, delimiter)
    table = kept_or(partial(_read_table, path, names, delimiter), path)
    source = source_of(table, name=path.name, locate=_locator(path, delimiter))
    return replace(source, notes=tuple(notes_on_swallowed(source, delimiter)))


def _read_table(path: Path, names: list[str], delimiter: str, keep_as: Path) -> pa.Table:
    if first_bad_byte(path) is None:
        try:
            return _read_whole(path, names, delimiter, keep_as)
        except Faulty:
            pass
    return _read_row_by_row(path, names, delimiter, keep_as)


def _read_whole(path: Path, names: list[str], delimiter: str, keep_as: Path) -> pa.Table:
    """A file without faults. Raises Faulty where Arrow's parser does not take it, or reads it as what it is not."""
    block_bytes = BLOCK_BYTES
    while True:
        open_batches = partial(_text_batches, path, names, delimiter, block_bytes)
        try:
            kinds, last = _kinds(open_batches(), path)
            if _ends_in_line_break(last) and ends_in_open_quote(path, delimiter):
                raise Faulty
            schema = pa.schema([(name, kind.arrow_type) for name, kind in zip(names, kinds, strict=True)])
            converted = (_converted(batch, kinds, schema) for batch in open_batches())
            return gather(converted, schema=schema, keep_as=keep_as)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes >= _MOST_BLOCK_BYTES:
                raise Faulty from None
            block_bytes *= 2


def _text_batches(path: Path, names: list[str], delimiter: str, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """The file's rows, every cell as text."""
    with pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(block_size=block_bytes),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types={name: pa.string() for name in names}, strings_can_be_null=False
        ),
    ) as reader:
        assert reader.schema.names == names, "both parsers read the same header"
        yield from (batch for batch in reader if batch.num_rows)


def _kinds(batches: Iterator[pa.RecordBatch], path: Path) -> tuple[list[ColumnKind], pa.RecordBatch]:
    """What each column is, from all of its cells; and the last batch."""
    kinds: list[ColumnKind] | None = None
    batch = None
    for batch in batches:
        kinds = kinds or [ColumnKind.EMPTY] * batch.num_columns
        kinds = [refine(kind, column) for kind, column in zip(kinds, batch.columns, strict=True)]
    if batch is None or kinds is None:
        raise DataError(
            Problem(what="there is a header but no rows", where=path.name, expected="at least one row of data")
        )
    return kinds, batch


def _ends_in_line_break(last: pa.RecordBatch) -> bool:
    """Whether it may be that a quote is never closed: it swallows the rest of the file without complaint."""
    return any("\n" in (cell.as_py() or "") for cell in (column[-1] for column in last.columns))


def _converted(batch: pa.RecordBatch, kinds: list[ColumnKind], schema: pa.Schema) -> pa.RecordBatch:
    columns = [convert(kind, column) for kind, column in zip(kinds, batch.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _read_row_by_row(path: Path, names: list[str], delimiter: str, keep_as: Path) -> pa.Table:
    """A file with faults: the last column says what is wrong with a row, whose cells are missing then."""
    open_batches = partial(_judged_batches, path, names, delimiter)
    kinds, _ = _kinds((batch.select(names) for batch in open_batches()), path)
    fields = [pa.field(name, kind.arrow_type) for name, kind in zip(names, kinds, strict=True)]
    schema = pa.schema([*fields, (FAULT, pa.string())])
    converted = (_converted(batch, [*kinds, ColumnKind.TEXT], schema) for batch in open_batches())
    return gather(converted, schema=schema, keep_as=keep_as)


def _judged_batches(path: Path, names: list[str], delimiter: str) -> Iterator[pa.RecordBatch]:
    faulty = Unreadable(name=path.name, explain=partial(require_utf8, path))
    schema = pa.schema([(name, pa.string()) for name in (*names, FAULT)])
    rows = enumerate(judged_rows(path, delimiter, num_cells=len(names)))
    while block := list(islice(rows, _BATCH_ROWS)):
        cells: list[list[str | None]] = []
        for row, (record, problem) in block:
            if problem is None:
                cells.append([*record.cells, None])
            else:
                fault = faulty.fault(row, problem, where=f"{path.name}:{record.line}")
                cells.append([*[None] * len(names), fault])
        columns = [pa.array(column, type=pa.string()) for column in zip(*cells, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _locator(path: Path, delimiter: str) -> Callable[[int], str]:
    """Places as file:line. A cell may hold line breaks, so the lines are looked up in the file, at the first need."""

    @lru_cache(maxsize=1)
    def lines() -> Sequence[int]:
        return first_lines(path, delimiter)

    return lambda row: f"{path.name}:{lines()[row]}"
