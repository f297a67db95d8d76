"""A data set as it was read: one table, its name, and where each row stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from brim.errors import DataError, Problem

MAX_PLACES = 5  # a message locates this many rows and counts the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows to learn from or to run over. `locate(12)` says where row 12 (0-based) stands: "data.jsonl:13"."""

    table: pa.Table
    name: str  # the file's or folder's name, or what kind of thing was given
    locate: Callable[[int], str]


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
