"""Take data that is in memory already: rows, a dict of columns, a pandas frame, an Arrow table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from brim.data.halves import is_text
from brim.data.hidden_columns import MARK
from brim.data.records import columns_of, require_no_text
from brim.data.source import Source, plain, row_number, source_of
from brim.data.undecodable import without_undecodable
from brim.errors import DataError, Problem

if TYPE_CHECKING:
    import pandas as pd


def read_columns(columns: Mapping[str, Sequence[Any]], *, name: str = "the given columns") -> Source:
    """A dict of equally long columns. A row with a value that no column can hold has a fault."""
    locate = row_number(name)
    no_lists = [f"`{column}`" for column, values in columns.items() if not _is_list(values)]
    if no_lists:
        raise DataError(Problem(what=f"not a list: {', '.join(no_lists)}", where=name, expected="a list a column"))
    require_names([str(column) for column in columns], name)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{column}` {length:,}" for column, length in lengths.items())
        raise DataError(
            Problem(what=f"the columns differ in length: {listed}", where=name, expected="a value a row in each column")
        )
    faults: dict[int, Problem] = {}
    read = [
        each
        for column, values in columns.items()
        for each in columns_of(
            str(column), values if hasattr(values, "dtype") else list(values), locate=locate, faults=faults
        )
    ]
    return _source(_table(read), name, faults)


def read_rows(rows: Sequence[Mapping[str, Any]]) -> Source:
    """A list of dicts, one a row; a column that a row does not have is empty there."""
    columns = {name: None for row in rows for name in row}
    return read_columns({name: [row.get(name) for row in rows] for name in columns}, name="the given rows")


def read_pandas(frame: pd.DataFrame) -> Source:
    """A pandas frame; its index is not read, its NaN cells are missing."""
    name = "the data frame"
    names = [str(column) for column in frame.columns]
    require_names(names, name)
    faults: dict[int, Problem] = {}
    read = []
    for position, column in enumerate(names):
        series = frame.iloc[:, position]
        try:
            array = pa.Array.from_pandas(series)
            if pa.types.is_binary(array.type):
                require_no_text(series)
            read.append((pa.field(column, array.type), array))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            values = [None if missing else value for value, missing in zip(series, series.isna(), strict=True)]
            read += columns_of(column, values, locate=row_number(name), faults=faults)
    return _source(_table(read), name, faults)


def read_table(table: pa.Table) -> Source:
    """An Arrow table as it is; dictionary-encoded columns become their values."""
    require_names(table.column_names, "the table")
    return _source(table, "the table", {})


def _table(columns: Sequence[tuple[pa.Field, pa.Array]]) -> pa.Table:
    return pa.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _source(table: pa.Table, name: str, faults: dict[int, Problem]) -> Source:
    """faults: of rows that Python's values have; those of Arrow's bytes are added."""
    table, undecodable = without_undecodable(table.cast(plain(table.schema)), name)
    source = source_of(table, name=name, locate=row_number(name))
    return replace(source, faults={**undecodable, **faults})


def _is_list(values: Any) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)


def require_names(names: list[str], where: str) -> None:
    """Raise DataError for column names that stand twice, or that no table can have."""
    strange = [name for name in names if name.startswith(MARK) or not is_text(name)]
    if strange:
        listed = ", ".join(f"`{name.encode(errors='backslashreplace').decode()!r}`" for name in strange)
        raise DataError(Problem(what=f"column names that are no text: {listed}", where=where, fix="rename them"))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        listed = ", ".join(f"`{name}`" for name in twice)
        raise DataError(
            Problem(
                what=f"column names stand twice: {listed}",
                where=where,
                expected="a name of its own for each column",
                fix="rename or remove one of them",
            )
        )
