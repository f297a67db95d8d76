"""What a csv column holds: whole numbers, numbers, numbers in a form of their own, or text."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_MISSING_NUMBERS = ["", "nan", "NaN", "NAN", "null", "NULL", "Null", "NA", "N/A", "n/a", "<NA>", "None"]


class ColumnKind(Enum):
    """Ordered from the narrowest to the widest; a column is the widest of its parts."""

    EMPTY = 0  # no cell holds anything yet
    WHOLE = 1  # 64-bit whole numbers, written plainly
    NUMBER = 2  # numbers, written as Python writes them
    WRITTEN_NUMBER = 3  # numbers in another form (007, 1.10, 1e3), which are kept as they are written
    TEXT = 4

    @property
    def arrow_type(self) -> pa.DataType:
        return {ColumnKind.WHOLE: pa.int64(), ColumnKind.NUMBER: pa.float64()}.get(self, pa.string())


def refine(kind: ColumnKind, cells: pa.Array) -> ColumnKind:
    """What the column is, knowing also these cells (text; missing in rows that cannot be read)."""
    if kind is ColumnKind.TEXT:
        return kind
    cells = cells.drop_null()
    filled = cells.filter(pc.invert(pc.is_in(cells, pa.array(_MISSING_NUMBERS))))
    here = _kind_of(filled)
    if {kind, here} == {ColumnKind.WHOLE, ColumnKind.NUMBER}:
        return ColumnKind.WRITTEN_NUMBER  # 3 beside 3.5: as a float it would be written 3.0
    return max(kind, here, key=lambda each: each.value)


def convert(kind: ColumnKind, cells: pa.Array) -> pa.Array:
    """The cells (text) as the column's kind; empty cells are missing among numbers and empty text elsewhere."""
    if kind in (ColumnKind.TEXT, ColumnKind.EMPTY):
        return cells
    missing = pc.is_in(cells, pa.array(_MISSING_NUMBERS))
    return pc.if_else(missing, pa.scalar(None, pa.string()), cells).cast(kind.arrow_type)


def _kind_of(cells: pa.Array) -> ColumnKind:
    if len(cells) == 0:
        return ColumnKind.EMPTY
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
