"""Turn JSON-like records and columns into Arrow: one type a column, and the exact row where that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.data.read.cells import MARK, kind_field, kind_of_column, mixed_field, nested_field, text_array, without_halves
from brim.data.read.ledger import WAY_OUT, Faulty
from brim.data.read.spill import gather
from brim.errors import Problem

BATCH_ROWS = 4096


Record = dict[str, Any]


Locate = Callable[[int], str]


_PLAIN: dict[frozenset[type], pa.DataType] = {
    frozenset(): pa.null(),
    frozenset({str}): pa.string(),
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({float}): pa.float64(),
    frozenset({int, float}): pa.float64(),
}


_NO_COLUMN = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError)


_NESTED: dict[frozenset[type], str] = {frozenset({dict}): "objects", frozenset({list}): "lists"}


def table_of_records(
    records: Callable[[bool], Iterable[Record]], *, locate: Locate, keep_as: Path | None = None
) -> pa.Table:
    """JSON's records as a table: its columns are all keys in order of appearance, and a key that lacks is missing.

    A column without a common type, or of lists or objects, is kept as text (see cells.py).
    records: begins anew at each call. Called with False, it may raise Faulty; it is then called with True, and gives
    records that stand for the rows that cannot be read, too, and none with what no table can hold.
    When a later batch shows that a column is new or of another type than it seemed, all that is left is looked through,
    and reading starts over once with the types of all, so that a large input needs no second copy.
    """
    columns: dict[str, _Column] = {}
    judged = False
    while True:
        batches = _batches(records(judged), columns, locate, judged=judged)
        try:
            first = next(batches, None)
            if first is None:
                return gather([], schema=pa.schema([]))
            return gather(_chain(first, batches), schema=first.schema, keep_as=keep_as)
        except _TypesChanged:
            continue
        except (Faulty, UnicodeEncodeError):  # the latter of half a character
            if judged:
                raise
            columns, judged = {}, True


def columns_of(
    name: str, values: Sequence[Any], *, locate: Locate, faults: dict[int, Problem]
) -> list[tuple[pa.Field, pa.Array]]:
    """Python values as one Arrow column; where they have no common type as text, with a hidden column of their kinds.

    faults: takes the rows whose values no column can hold, which are then missing.
    """
    try:
        array = pa.array(values, from_pandas=False)
        if pa.types.is_binary(array.type):
            require_no_text(values)
    except _NO_COLUMN as error:
        values = without_halves(name, values, faults)
        if isinstance(error, UnicodeEncodeError):
            return columns_of(name, values, locate=locate, faults=faults)
        field = mixed_field(name, _why_not(name, values, locate, error))
        return [(field, text_array(values)), (kind_field(name), _kinds(values))]
    return [(pa.field(name, array.type), array)]


def require_no_text(values: Iterable[Any]) -> None:
    """Raise ArrowTypeError for text among bytes, as which Arrow would take it."""
    if any(isinstance(value, str) for value in values):
        raise pa.ArrowTypeError("text among bytes")


def kind_of(value: Any) -> str:
    """What a person calls this value's type."""
    return _kind_of_type(type(value))


def _kind_of_type(kind: type) -> str:
    if issubclass(kind, bool):
        return "true or false"
    if issubclass(kind, int | float):
        return "a number"
    if issubclass(kind, str):
        return "text"
    if issubclass(kind, dict):
        return "an object"
    if issubclass(kind, list | tuple):
        return "a list"
    if issubclass(kind, bytes):
        return "bytes"
    return f"a {kind.__name__}"


class _TypesChanged(Exception):
    """A later batch needs other types than the first ones have been read with."""


@dataclass(slots=True)
class _Column:
    """What the values of a column are, as far as they have been seen."""

    first_rows: dict[type, int] = field(default_factory=dict)  # the row of each type's first value
    magnitude: int = -1  # of the largest whole number, counted so that 64 bits hold all below 2**63
    largest_row: int = 0

    def learn(self, values: list[Any], first_row: int) -> None:
        types = set(map(type, values))
        for kind in types - self.first_rows.keys() - {type(None)}:
            self.first_rows[kind] = first_row + next(row for row, value in enumerate(values) if type(value) is kind)
        if int in types:
            whole = values if len(types) == 1 else [value for value in values if type(value) is int]
            for extreme in (max(whole), min(whole)):
                magnitude = extreme if extreme >= 0 else ~extreme
                if magnitude > self.magnitude:
                    row = next(row for row, value in enumerate(values) if type(value) is int and value == extreme)
                    self.magnitude, self.largest_row = magnitude, first_row + row

    def type(self) -> pa.DataType | str | None:
        """An Arrow type, the word for nested values, or None where nothing but text holds them all."""
        kinds = frozenset(self.first_rows)
        if int in kinds and self.magnitude > self._most():
            return None
        return _NESTED.get(kinds) or _PLAIN.get(kinds)

    def fields(self, name: str, locate: Locate) -> list[pa.Field]:
        """The column's field, and a hidden one for the kinds of mixed values."""
        kind = self.type()
        if kind is None:
            return [mixed_field(name, self._problem(name, locate)), kind_field(name)]
        return [nested_field(name, kind) if isinstance(kind, str) else pa.field(name, kind)]

    def _most(self) -> int:
        return 2**53 if float in self.first_rows else 2**63 - 1

    def _problem(self, name: str, locate: Locate) -> Problem:
        by_row = sorted(self.first_rows.items(), key=lambda item: item[1])
        first, first_row = by_row[0]
        for kind, row in by_row[1:]:
            if _kind_of_type(kind) != _kind_of_type(first):
                return _changes(name, _kind_of_type(kind), locate(row), _kind_of_type(first), locate(first_row))
        if float in self.first_rows and self.magnitude < 2**63:
            return Problem(
                what=f"column `{name}` holds fractions and a whole number beyond 53 bits, which would be rounded",
                where=locate(self.largest_row),
                fix=f"write all of its values as text, in quotes; or {WAY_OUT}",
            )
        return _beyond_64_bits(name, locate(self.largest_row))


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _batches(
    records: Iterable[Record], columns: dict[str, _Column], locate: Locate, *, judged: bool
) -> Iterator[pa.RecordBatch]:
    """Batches of one schema. Raises _TypesChanged, with `columns` complete, when that turns out too narrow.

    Raises Faulty for the name of a hidden column, unless the records are judged and it is one.
    """
    stream = iter(records)
    schema: pa.Schema | None = None
    types: dict[str, pa.DataType | str | None] = {}
    first_row = 0
    while batch := list(islice(stream, BATCH_ROWS)):
        values = _learn(columns, batch, first_row)
        if not judged and any(name.startswith(MARK) for name in values):
            raise Faulty
        seen = {name: column.type() for name, column in columns.items()}
        if schema is None:
            fields = [field for name, column in columns.items() for field in column.fields(name, locate)]
            schema, types = pa.schema(fields), seen
        elif seen != types:
            while rest := list(islice(stream, BATCH_ROWS)):
                first_row += len(batch)
                batch = rest
                _learn(columns, batch, first_row)
            raise _TypesChanged
        yield pa.RecordBatch.from_arrays([_array(each, values, len(batch)) for each in schema], schema=schema)
        first_row += len(batch)


def _learn(columns: dict[str, _Column], batch: list[Record], first_row: int) -> dict[str, list[Any]]:
    """The batch by columns, its types noted."""
    names = dict.fromkeys(name for record in batch for name in record)
    values = {name: [record.get(name) for record in batch] for name in names}
    for name in names:
        columns.setdefault(name, _Column()).learn(values[name], first_row)
    return values


def _array(field: pa.Field, by_name: dict[str, list[Any]], length: int) -> pa.Array:
    mixed = kind_of_column(field)
    values = by_name.get(field.name if mixed is None else mixed)
    if values is None:
        return pa.nulls(length, field.type)
    if mixed is not None:
        return _kinds(values)
    return text_array(values) if pa.types.is_string(field.type) else pa.array(values, type=field.type)


def _kinds(values: Sequence[Any]) -> pa.Array:
    """What each value is, in words; missing where it is."""
    return pa.array([None if value is None else kind_of(value) for value in values], type=pa.string())


def _why_not(name: str, values: Sequence[Any], locate: Locate, error: Exception) -> Problem:
    """The first value that differs in type from those before it, or that Arrow cannot hold."""
    first: tuple[int, str] | None = None
    for row, value in enumerate(values):
        if value is None:
            continue
        kind = kind_of(value)
        if first is None:
            first = (row, kind)
        elif kind != first[1]:
            return _changes(name, kind, locate(row), first[1], locate(first[0]))
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return _beyond_64_bits(name, locate(row))
    return Problem(
        what=f"column `{name}` holds values of different shapes ({error})",
        where=locate(_first_misfit(values)),
        expected="lists and objects of the same shape in all rows",
    )


def _first_misfit(values: Sequence[Any]) -> int:
    """The position of the first value that Arrow cannot hold together with those before it."""
    fits, too_many = 0, len(values)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            pa.array(values[:middle])
            fits = middle
        except _NO_COLUMN:
            too_many = middle
    return too_many - 1


def _changes(name: str, kind: str, where: str, first_kind: str, first_where: str) -> Problem:
    return Problem(
        what=f"column `{name}` changes its type: {kind} here, {first_kind} in {first_where}",
        where=where,
        expected="one type in all rows of a column",
        fix=f"write all of its values in the same type, e.g. all as text; or {WAY_OUT}",
    )


def _beyond_64_bits(name: str, where: str) -> Problem:
    what = f"column `{name}` holds a whole number beyond 64 bits"
    return Problem(what=what, where=where, fix=f"write it as text, in quotes; or {WAY_OUT}")
