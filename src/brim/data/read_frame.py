"""Take data that is in memory already: a dict of columns, a pandas frame, an Arrow table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from brim.data.records import column_of
from brim.data.source import Source, plain, row_number
from brim.errors import DataError, Problem

if TYPE_CHECKING:
    import pandas as pd


def read_columns(columns: Mapping[str, Sequence[Any]], *, name: str = "the given columns") -> Source:
    """A dict of equally long columns."""
    locate = row_number(name)
    no_lists = [f"`{column}`" for column, values in columns.items() if not _is_list(values)]
    if no_lists:
        raise DataError(Problem(what=f"not a list: {', '.join(no_lists)}", where=name, expected="a list a column"))
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{column}` {length:,}" for column, length in lengths.items())
        raise DataError(
            Problem(what=f"the columns differ in length: {listed}", where=name, expected="a value a row in each column")
        )
    read = [
        column_of(str(column), values if hasattr(values, "dtype") else list(values), locate=locate)
        for column, values in columns.items()
    ]
    return _source(pa.table([array for _, array in read], schema=pa.schema([field for field, _ in read])), name)


def read_pandas(frame: pd.DataFrame) -> Source:
    """A pandas frame; its index is not read, its NaN cells are missing."""
    name = "the data frame"
    names = [str(column) for column in frame.columns]
    require_distinct(names, name)
    arrays, fields = [], []
    for position, column in enumerate(names):
        series = frame.iloc[:, position]
        try:
            array = pa.Array.from_pandas(series)
            field = pa.field(column, array.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            values = [None if missing else value for value, missing in zip(series, series.isna(), strict=True)]
            field, array = column_of(column, values, locate=row_number(name))
        arrays.append(array)
        fields.append(field)
    return _source(pa.table(arrays, schema=pa.schema(fields)), name)


def read_table(table: pa.Table) -> Source:
    """An Arrow table as it is; dictionary-encoded columns become their values."""
    require_distinct(table.column_names, "the table")
    return _source(table, "the table")


def _source(table: pa.Table, name: str) -> Source:
    return Source(table=table.cast(plain(table.schema)), name=name, locate=row_number(name))


def _is_list(values: Any) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)


def require_distinct(names: list[str], where: str) -> None:
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
