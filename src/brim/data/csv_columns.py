"""What a csv column holds: whole numbers, numbers, numbers in a form of their own, or text.

An empty cell is missing in each of them: csv has no other way of saying so.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_DECIMAL_COMMA = b"brim.decimal_comma"
_WITH_COMMA = r"^-?[0-9]+,[0-9]+$"
_MISSING_NUMBERS = ["", "nan", "NaN", "NAN", "null", "NULL", "Null", "NA", "N/A", "n/a", "<NA>", "None"]


class ColumnKind(Enum):
    """Ordered from the narrowest to the widest; a column is the widest of its parts."""

    EMPTY = 0  # no cell holds anything yet
    WHOLE = 1  # 64-bit whole numbers, written plainly
    NUMBER = 2  # numbers, written as Python writes them
    WRITTEN_NUMBER = 3  # numbers in another form (007, 1.10, 1e3), which are kept as they are written
    WITH_COMMAS = 4  # numbers with a decimal comma (1,5), which are kept as they are written
    TEXT = 5

    def field(self, name: str) -> pa.Field:
        """A column of this kind."""
        types = {ColumnKind.WHOLE: pa.int64(), ColumnKind.NUMBER: pa.float64()}
        metadata = {_DECIMAL_COMMA: b""} if self is ColumnKind.WITH_COMMAS else None
        return pa.field(name, types.get(self, pa.string()), metadata=metadata)


def has_decimal_commas(field: pa.Field) -> bool:
    """Whether a column holds numbers as text, with a comma before their decimals."""
    return _DECIMAL_COMMA in (field.metadata or {})


def refine(kind: ColumnKind, cells: pa.Array, *, decimal_commas: bool = False) -> ColumnKind:
    """What the column is, knowing also these cells (text; missing in rows that cannot be read)."""
    if kind is ColumnKind.TEXT:
        return kind
    cells = cells.drop_null()
    filled = cells.filter(pc.invert(pc.is_in(cells, pa.array(_MISSING_NUMBERS))))
    here = _kind_of(filled, decimal_commas=decimal_commas)
    if {kind, here} == {ColumnKind.WHOLE, ColumnKind.NUMBER}:
        return ColumnKind.WRITTEN_NUMBER  # 3 beside 3.5: as a float it would be written 3.0
    if ColumnKind.WITH_COMMAS in (kind, here) and {kind, here} & {ColumnKind.NUMBER, ColumnKind.WRITTEN_NUMBER}:
        return ColumnKind.TEXT  # 1,5 beside 1.5
    return max(kind, here, key=lambda each: each.value)


def convert(kind: ColumnKind, cells: pa.Array) -> pa.Array:
    """The cells (text) as the column's kind."""
    is_text = kind in (ColumnKind.TEXT, ColumnKind.EMPTY)
    missing = pc.is_in(cells, pa.array([""] if is_text else _MISSING_NUMBERS))
    return pc.if_else(missing, pa.scalar(None, pa.string()), cells).cast(kind.field("").type)


def _kind_of(cells: pa.Array, *, decimal_commas: bool) -> ColumnKind:
    if len(cells) == 0:
        return ColumnKind.EMPTY
    if decimal_commas:
        has_comma = pc.match_substring_regex(cells, _WITH_COMMA)
        if pc.any(has_comma).as_py():
            others = _kind_of(cells.filter(pc.invert(has_comma)), decimal_commas=False)
            return ColumnKind.WITH_COMMAS if others in (ColumnKind.EMPTY, ColumnKind.WHOLE) else ColumnKind.TEXT
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
