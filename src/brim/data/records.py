"""JSON-like records and columns as Arrow: one type a column, and the exact row where that breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.data.spill import gather
from brim.errors import DataError, Problem

BATCH_ROWS = 4096

Record = dict[str, Any]
Locate = Callable[[int], str]


def table_of_records(
    records: Callable[[], Iterable[Record]], *, locate: Locate, keep_as: Path | None = None
) -> pa.Table:
    """Records as a table whose columns are all keys in order of appearance; a key that a record lacks is missing.

    records: begins anew at each call. A later batch can bring a new key, or text where all was missing so far: then
    reading starts over with what is known now, so that a large input needs no second copy.
    """
    schema = pa.schema([])
    while True:
        batches = _batches(records(), schema, locate)
        try:
            first = next(batches, None)
            if first is None:
                return gather([], schema=schema)
            return gather(_chain(first, batches), schema=first.schema, keep_as=keep_as)
        except _SchemaGrew as grew:
            schema = grew.schema


def column_of(name: str, values: Sequence[Any], *, locate: Locate, first_row: int = 0) -> pa.Array:
    """Python values as one Arrow column. Raises DataError at the row whose type differs from those before."""
    try:
        return pa.array(values, from_pandas=False)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        OverflowError,
        UnicodeEncodeError,
    ) as error:
        raise DataError(_why_not(name, values, locate, first_row, error)) from None


def kind_of(value: Any) -> str:
    """What a person calls this value's type."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}"


class _SchemaGrew(Exception):
    def __init__(self, schema: pa.Schema) -> None:
        super().__init__("a later batch needs a wider schema")
        self.schema = schema


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _batches(records: Iterable[Record], schema: pa.Schema, locate: Locate) -> Iterator[pa.RecordBatch]:
    """Batches of one schema, which is at least `schema`; raises _SchemaGrew when that turns out too narrow."""
    stream = iter(records)
    first_row = 0
    seen: dict[str, tuple[int, Any]] = {}  # each column's first value and its row
    while batch := list(islice(stream, BATCH_ROWS)):
        names = dict.fromkeys([*schema.names, *(name for record in batch for name in record)])
        columns = {name: [record.get(name) for record in batch] for name in names}
        for name, values in columns.items():
            _remember_first(seen, name, values, first_row)
        arrays = {name: column_of(name, values, locate=locate, first_row=first_row) for name, values in columns.items()}
        wider = _widened(schema, arrays, columns, seen, locate, first_row)
        if first_row and wider != schema:
            raise _SchemaGrew(wider)
        schema = wider
        yield pa.RecordBatch.from_arrays(
            [_as_type(arrays[field.name], columns[field.name], field.type) for field in schema], schema=schema
        )
        first_row += len(batch)


def _remember_first(seen: dict[str, tuple[int, Any]], name: str, values: list[Any], first_row: int) -> None:
    if name not in seen:
        for number, value in enumerate(values):
            if value is not None:
                seen[name] = (first_row + number, value)
                return


def _widened(
    schema: pa.Schema,
    arrays: dict[str, pa.Array],
    columns: dict[str, list[Any]],
    seen: dict[str, tuple[int, Any]],
    locate: Locate,
    first_row: int,
) -> pa.Schema:
    """The narrowest schema that holds both `schema` and these columns."""
    fields = []
    for name, array in arrays.items():
        known = schema.field(name).type if name in schema.names else pa.null()
        try:
            both = pa.unify_schemas(
                [pa.schema([(name, known)]), pa.schema([(name, array.type)])], promote_options="permissive"
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            row, value = seen[name]
            values = [value, *columns[name]]
            rows = [row, *range(first_row, first_row + len(columns[name]))]
            raise DataError(_why_not(name, values, _relocated(locate, rows), 0, error)) from None
        fields.append(both.field(0))
    return pa.schema(fields)


def _relocated(locate: Locate, rows: list[int]) -> Locate:
    return lambda number: locate(rows[number])


def _as_type(array: pa.Array, values: list[Any], kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else pa.array(values, type=kind)


def _why_not(name: str, values: Sequence[Any], locate: Locate, first_row: int, error: Exception) -> Problem:
    """The first value that differs in type from those before it, or that Arrow cannot hold."""
    first: tuple[int, str] | None = None
    for row, value in enumerate(values, first_row):
        if value is None:
            continue
        kind = kind_of(value)
        if first is None:
            first = (row, kind)
        elif kind != first[1]:
            return Problem(
                what=f"column `{name}` changes its type: {kind} here, {first[1]} in {locate(first[0])}",
                where=locate(row),
                expected="one type in all rows of a column",
                fix="write all of its values in the same type, e.g. all as text",
            )
        problem = (
            _beyond_arrow(name, value, locate(row)) if kind in ("a number", "text", "an object", "a list") else None
        )
        if problem:
            return problem
    return Problem(
        what=f"column `{name}` holds values of different shapes ({error})",
        where=locate(first_row + _first_misfit(values)),
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
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            too_many = middle
    return too_many - 1


def _beyond_arrow(name: str, value: Any, place: str) -> Problem | None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        what, fix = f"column `{name}` holds a whole number beyond 64 bits", "write it as text, in quotes"
        return Problem(what=what, where=place, fix=fix)
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        what = f"column `{name}` holds half of a character (a lone surrogate such as \\ud83d), which no text can hold"
        return Problem(what=what, where=place, fix="write the whole character, or remove it")
    return None
