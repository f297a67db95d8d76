"""Texts in Arrow data whose bytes are no UTF-8: Arrow takes them unseen, and whoever reads such a cell would fail."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.errors import DataError, Problem


def without_undecodable(table: pa.Table, name: str) -> tuple[pa.Table, dict[int, Problem]]:
    """The table with such cells missing, and why their rows cannot be read.

    name: of the source. Raises DataError for a column that is damaged otherwise.
    """
    faults: dict[int, Problem] = {}
    for position, field in enumerate(table.schema):
        column = table.column(position)
        if not _holds_text(field.type) or _is_valid(column, field.name, name):
            continue
        bad = _undecodable(column, field.name, name)
        for row in bad.tolist():
            what = f"column `{field.name}` holds bytes that are not UTF-8 text"
            faults.setdefault(row, Problem(what=what, fix="write the text in UTF-8"))
        table = table.set_column(position, field, _with_missing(column, bad))
    return table, faults


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_text(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_valid(column: pa.ChunkedArray | pa.Array, column_name: str, name: str) -> bool:
    """Whether all of its text is UTF-8. Raises DataError where it is not even certain where its texts begin and end."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):  # Arrow looks at the texts last
            return False
        raise DataError(
            Problem(
                what=f"column `{column_name}` is damaged: {error}", where=name, fix="write or download the data again"
            )
        ) from None
    return True


def _undecodable(column: pa.ChunkedArray, column_name: str, name: str) -> npt.NDArray[np.int64]:
    """The rows that cannot be decoded."""
    rows: list[int] = []
    first_row = 0
    for chunk in column.chunks:
        if not _is_valid(chunk, column_name, name):
            rows += [first_row + row for row in range(len(chunk)) if not _is_decodable(chunk[row])]
        first_row += len(chunk)
    return np.asarray(rows, dtype=np.int64)


def _is_decodable(cell: pa.Scalar) -> bool:
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True


def _with_missing(column: pa.ChunkedArray, rows: npt.NDArray[np.int64]) -> pa.ChunkedArray:
    is_missing = np.zeros(len(column), dtype=np.bool_)
    is_missing[rows] = True
    chunks, first_row = [], 0
    for chunk in column.chunks:
        here = pa.array(np.arange(len(chunk)), mask=is_missing[first_row : first_row + len(chunk)])
        chunks.append(chunk.take(here))
        first_row += len(chunk)
    return pa.chunked_array(chunks, type=column.type)
