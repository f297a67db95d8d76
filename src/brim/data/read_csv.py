"""Read csv and tsv so that what stands in the file is what the model sees.

Cells are text, verbatim. A column becomes a number column only where writing the numbers again gives the file's text
back ("007" and "1.10" stay text); in columns of numbers, of either kind, an empty cell is missing, in others it is
the empty text. "NaN", "NULL" and "NA" are words in a text column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from brim.data.csv_columns import ColumnKind, convert, refine
from brim.data.csv_records import find_problems, first_lines, read_header
from brim.data.source import Source
from brim.data.spill import gather, kept_or
from brim.errors import DataError, Problem

BLOCK_BYTES = 8 * 2**20  # parsed at a time; doubled while a single row is longer
_MOST_BLOCK_BYTES = 2**30


def read_csv(path: Path, *, delimiter: str) -> Source:
    """A delimited text file with a header line. Raises DataError naming each broken line."""
    names = read_header(path, delimiter)
    table = kept_or(partial(_read_table, path, names, delimiter), path)
    return Source(table=table, name=path.name, locate=_locator(path, delimiter))


def _read_table(path: Path, names: list[str], delimiter: str, keep_as: Path) -> pa.Table:
    block_bytes = BLOCK_BYTES
    while True:
        open_batches = partial(_text_batches, path, names, delimiter, block_bytes)
        try:
            kinds = _kinds(open_batches(), path, delimiter)
            schema = pa.schema([(name, kind.arrow_type) for name, kind in zip(names, kinds, strict=True)])
            converted = (_converted(batch, kinds, schema) for batch in open_batches())
            return gather(converted, schema=schema, keep_as=keep_as)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes >= _MOST_BLOCK_BYTES:
                raise DataError(*_problems(path, delimiter, str(error))) from None
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


def _kinds(batches: Iterator[pa.RecordBatch], path: Path, delimiter: str) -> list[ColumnKind]:
    """What each column is, from all of its cells."""
    kinds: list[ColumnKind] | None = None
    batch = None
    for batch in batches:
        kinds = kinds or [ColumnKind.EMPTY] * batch.num_columns
        kinds = [refine(kind, column) for kind, column in zip(kinds, batch.columns, strict=True)]
    if batch is None or kinds is None:
        raise DataError(
            Problem(what="there is a header but no rows", where=path.name, expected="at least one row of data")
        )
    if any("\n" in (cell.as_py() or "") for cell in (column[-1] for column in batch.columns)):
        # A quote that is never closed swallows the rest of the file into the last cell without complaint.
        problems = find_problems(path, delimiter)
        if problems:
            raise DataError(*problems)
    return kinds


def _converted(batch: pa.RecordBatch, kinds: list[ColumnKind], schema: pa.Schema) -> pa.RecordBatch:
    columns = [convert(kind, column) for kind, column in zip(kinds, batch.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _problems(path: Path, delimiter: str, message: str) -> list[Problem]:
    found = find_problems(path, delimiter)
    return found or [Problem(what=f"the file cannot be read: {message}", where=path.name)]


def _locator(path: Path, delimiter: str) -> Callable[[int], str]:
    """Places as file:line. A cell may hold line breaks, so the lines are looked up in the file, at the first need."""

    @lru_cache(maxsize=1)
    def lines() -> Sequence[int]:
        return first_lines(path, delimiter)

    return lambda row: f"{path.name}:{lines()[row]}"
