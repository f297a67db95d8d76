"""A data set as it was read: one table, its name, where each row stands, and which rows could not be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.data.hidden_columns import faults_of, kinds_of, shown
from brim.errors import DataError, Problem

MAX_PLACES = 5  # a message locates this many rows and counts the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows to learn from or to run over. `locate(12)` says where row 12 (0-based) stands: "data.jsonl:13".

    A row that could not be read keeps its number: its cells are missing and `faults` says why. What becomes of it is
    decided later (see usable.py).
    """

    table: pa.Table
    name: str  # the file's or folder's name, or what kind of thing was given
    locate: Callable[[int], str]
    faults: Mapping[int, Problem] = field(default_factory=dict)  # why rows cannot be used, by row; without a place
    kinds: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)  # of each cell of a mixed column: "a number", …
    notes: tuple[str, ...] = ()  # what to know of how it was read

    def usable_rows(self) -> npt.NDArray[np.int64]:
        """The rows without a fault, in their order."""
        is_usable = np.ones(self.table.num_rows, dtype=np.bool_)
        is_usable[list(self.faults)] = False
        return np.flatnonzero(is_usable)


def source_of(table: pa.Table, *, name: str, locate: Callable[[int], str]) -> Source:
    """A table, which may have hidden columns, as a source."""
    return Source(table=shown(table), name=name, locate=locate, faults=faults_of(table), kinds=kinds_of(table))


def row_number(name: str) -> Callable[[int], str]:
    """Places as row numbers, for data that has no lines."""
    return lambda row: f"{name}, row {row}"


def places(source: Source, rows: list[int]) -> str:
    """Where the first few of these rows stand: "data.csv:2, data.csv:7 and 12 more"."""
    located = ", ".join(source.locate(row) for row in rows[:MAX_PLACES])
    return located if len(rows) <= MAX_PLACES else f"{located} and {len(rows) - MAX_PLACES:,} more"


def require_rows(table: pa.Table, name: str) -> pa.Table:
    """The table, unless it is empty."""
    if table.num_columns == 0 or table.num_rows == 0:
        raise DataError(Problem(what="the data set has no rows", where=name, expected="at least one row of data"))
    return table


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionary-encoded columns as their values and text as one type."""
    return pa.schema([pa.field(field.name, _plain_type(field.type), metadata=field.metadata) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return kind
