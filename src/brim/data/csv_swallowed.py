"""Rows that have gone into a cell: a quote that is left open is closed by the next one, lines further down."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from brim.data.source import MAX_PLACES, Source
from brim.notes import warning

_FEWEST_LINES = 3  # within a cell, beside its first and last


def notes_on_swallowed(source: Source, delimiter: str) -> list[str]:
    """A note where each line within a cell would be a row of its own. It may be one: a table in a cell is no error."""
    most = max(MAX_PLACES, source.table.num_rows // 10)  # where there are more, such cells are what the data is about
    found = list(islice(_swallowed(source.table, delimiter), most + 1))
    if not 0 < len(found) <= most:
        return []
    shown = ", ".join(f"{source.locate(row)} ({num_lines:,} of them)" for row, num_lines in found[:MAX_PLACES])
    more = f" and {len(found) - MAX_PLACES:,} more" if len(found) > MAX_PLACES else ""
    cells = "1 cell holds" if len(found) == 1 else f"{len(found):,} cells hold"
    told = (
        f"{cells} lines that look like rows of their own: "
        f'{shown}{more}; look whether a " was left open there: the next one closes it, and all between is one cell'
    )
    return [warning(told, topic="rows")]


def _swallowed(table: pa.Table, delimiter: str) -> Iterator[tuple[int, int]]:
    """The row of each such cell, and how many lines it holds that look like rows."""
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
