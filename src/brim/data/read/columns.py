r"""Give each column of Python's values one type; one that has none is text, with the kind of each cell beside it.

Such a column is an error only where it is used. What is wrong with it stands in the Arrow field, so that it stays with
the table wherever the table goes; in a file it is a struct of text and kind, which `taken_apart` parts. Lists and
objects are kept as JSON: as Arrow types they would grow with each new key.

Lone surrogates, such as \ud83d, are single parts of surrogate pairs, which JSON and Python can write and no text can
hold: a value with one is missing, and its row is faulty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from brim.data.read.ledger import WAY_OUT
from brim.data.read.spill import Faults, gather
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


_NESTED: dict[frozenset[type], str] = {frozenset({dict}): "objects", frozenset({list}): "lists"}


_KINDS = (  # what a person calls a type
    (bool, "true or false"),
    (int | float, "a number"),
    (str, "text"),
    (dict, "an object"),
    (list | tuple, "a list"),
    (bytes, "bytes"),
)


_NO_COLUMN = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError)


_MIXED = pa.struct([("text", pa.string()), ("kind", pa.string())])


_PROBLEM, _NESTED_WORD = b"brim.problem", b"brim.nested"


_MOST_FIELDS = 64  # of an object's type; more are not fields but keys that differ from row to row


_MOST_WHOLE, _MOST_WHOLE_AMONG_FRACTIONS = 2**63 - 1, 2**53  # larger ones are not exact as floats


def table_of_records(
    records: Callable[[], Iterable[Record]], *, locate: Locate, keep_as: Path | None, faults: Faults
) -> pa.Table:
    """Return JSON's records as a table: its columns are all keys as they appear; a missing key is a missing cell.

    records: starts over at each call. faults: of rows that cannot be read, which fill while records are drawn.
    When a later batch shows that a column is new or of another type than it seemed, all that is left is looked through,
    and reading starts over once with the types of all, so that a large input needs no second copy.
    """
    columns: dict[str, _Column] = {}
    while True:
        batches = _batches(records(), columns, locate)
        try:
            first = next(batches, None)
            if first is None:
                return gather([], schema=pa.schema([]))
            return gather(chain([first], batches), schema=first.schema, keep_as=keep_as, faults=faults)
        except _TypesChanged:
            continue


def column_of(name: str, values: Sequence[Any], *, locate: Locate, faults: Faults) -> tuple[pa.Field, pa.Array]:
    """Return Python's values as one Arrow column, a mixed one where they have no common type.

    faults: takes the rows whose values no column can hold, which are then missing.
    """
    try:
        array = pa.array(values, from_pandas=False)
        if pa.types.is_binary(array.type):
            require_no_text(values)
    except _NO_COLUMN as error:
        values = _without_halves(name, values, faults)
        if isinstance(error, UnicodeEncodeError):
            return column_of(name, values, locate=locate, faults=faults)
        return _mixed_field(name, _why_not(name, values, locate, error)), _mixed_array(values)
    return pa.field(name, array.type), array


def require_no_text(values: Iterable[Any]) -> None:
    """Raise ArrowTypeError for text among bytes, which Arrow would take for bytes."""
    if any(isinstance(value, str) for value in values):
        raise pa.ArrowTypeError("text among bytes")


def taken_apart(table: pa.Table) -> tuple[pa.Table, dict[str, pa.ChunkedArray]]:
    """Return the table with mixed columns as text, and by column the kinds of their cells ("text", "a number", …)."""
    kinds = {}
    for position, each in enumerate(table.schema):
        if each.type == _MIXED and problem_of(each) is not None:
            texts, kinds[each.name] = table.column(position).flatten()
            table = table.set_column(position, each.with_type(pa.string()), texts)
    return table, kinds


def with_problem(field: pa.Field, problem: Problem) -> pa.Field:
    """Return the field of a column whose values have no common type. problem: for those who use it."""
    return field.with_metadata({_PROBLEM: json.dumps(asdict(problem))})


def problem_of(field: pa.Field) -> Problem | None:
    """Return why the values of a column have no common type; None where they have one."""
    stored = (field.metadata or {}).get(_PROBLEM)
    return None if stored is None else Problem(**json.loads(stored))


def nested_word(field: pa.Field) -> str:
    """Return "lists" or "objects" where the column's text is JSON of these, else nothing."""
    return str((field.metadata or {}).get(_NESTED_WORD, b"").decode())


def without_origin(field: pa.Field) -> pa.Field:
    """Return the field without metadata other than that its text is JSON."""
    word = nested_word(field)
    return _nested_field(field.name, word) if word else pa.field(field.name, field.type)


def nested_values(texts: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the lists or objects of such a column."""
    return [None if text is None else json.loads(text) for text in texts.to_pylist()]


def nested_type(texts: pa.ChunkedArray) -> pa.DataType | None:
    """Return the Arrow type that holds all of such a column's values.

    None where none does, or one with very many fields.
    """
    found: pa.Schema | None = None
    try:
        for start in range(0, len(texts), BATCH_ROWS):
            kind = pa.infer_type(nested_values(texts.slice(start, BATCH_ROWS)))
            schema = pa.schema([("values", kind)])
            found = schema if found is None else pa.unify_schemas([found, schema], promote_options="permissive")
            if _num_fields(found.field(0).type) > _MOST_FIELDS:
                return None
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None
    return None if found is None or not pa.types.is_nested(found.field(0).type) else found.field(0).type


def cell_texts(column: pa.ChunkedArray, *, fill: str = "") -> list[str]:
    """Return cells as text: numbers as Python writes them ("3", "0.5"), "True" and "False", dates as 2024-01-31."""
    if pa.types.is_floating(column.type) and column.type != pa.float64():
        cells = list(column.to_numpy())  # numpy writes a float32 as short as it can be: 0.1
    else:
        cells = column.to_pylist()
    return [fill if cell is None or cell != cell else str(cell) for cell in cells]


def kind_of(value: Any) -> str:
    """Return what a person calls this value's type."""
    return _kind_of_type(type(value))


def of_one_kind(name: str, texts: pa.Array, kinds: pa.Array, faults: Faults) -> tuple[pa.Field, pa.Array]:
    """Return a mixed column as one of the kind of most values, as if other rows were not there.

    The kind of most values; among equals text, else the first. What the cells of other rows were goes to the faults.
    """
    counts = {each["values"]: each["counts"] for each in pc.value_counts(kinds.drop_null()).to_pylist()}
    kind: str = max(counts, key=lambda each: (counts[each], each == "text"))
    for row in pc.indices_nonzero(pc.not_equal(kinds, kind)).to_pylist():
        what = f"column `{name}` holds {kinds[row].as_py()} here and {kind} in most rows"
        faults.setdefault(row, Problem(what=what, expected="one type in all rows of a column"))
    own = pc.if_else(pc.equal(kinds, kind), texts, pa.scalar(None, pa.string()))
    if kind == "a number":
        numbers = _numbers(name, own, faults)
        return pa.field(name, numbers.type), numbers
    if kind == "true or false":
        return pa.field(name, pa.bool_()), pc.equal(own, "true")
    words = {"a list": "lists", "an object": "objects"}
    return (_nested_field(name, words[kind]) if kind in words else pa.field(name, pa.string())), own


def problem_of_record(record: Mapping[str, Any]) -> Problem | None:
    """Return what no table can hold of a JSON object: half a character, or a name that begins with NUL."""
    for name, cell in record.items():
        if name.startswith("\0"):
            return Problem(what="a column's name begins with the character NUL", fix="give the column another name")
        if not is_text(name) or not is_text(_text_of(cell)):
            return _half(name)
    return None


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _TypesChanged(Exception):
    """Signal that a later batch needs other types than the first ones have been read with."""


@dataclass(slots=True)
class _Column:
    """Hold what the values of a column are, as far as they have been seen."""

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
        """Return an Arrow type, the word for nested values, or None where nothing but text holds them all."""
        kinds = frozenset(self.first_rows)
        most = _MOST_WHOLE_AMONG_FRACTIONS if float in kinds else _MOST_WHOLE
        return None if int in kinds and self.magnitude > most else _NESTED.get(kinds) or _PLAIN.get(kinds)

    def field(self, name: str, locate: Locate) -> pa.Field:
        kind = self.type()
        if kind is None:
            return _mixed_field(name, self._problem(name, locate))
        return _nested_field(name, kind) if isinstance(kind, str) else pa.field(name, kind)

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


def _batches(records: Iterable[Record], columns: dict[str, _Column], locate: Locate) -> Iterator[pa.RecordBatch]:
    """Give batches of one schema. Raises _TypesChanged, with `columns` complete, when that turns out too narrow."""
    stream = iter(records)
    schema: pa.Schema | None = None
    types: dict[str, pa.DataType | str | None] = {}
    first_row = 0
    while batch := list(islice(stream, BATCH_ROWS)):
        values = _learn(columns, batch, first_row)
        seen = {name: column.type() for name, column in columns.items()}
        if schema is None:
            schema, types = pa.schema([column.field(name, locate) for name, column in columns.items()]), seen
        elif seen != types:
            while rest := list(islice(stream, BATCH_ROWS)):
                first_row += len(batch)
                batch = rest
                _learn(columns, batch, first_row)
            raise _TypesChanged
        arrays = [_array(each, values.get(each.name), len(batch)) for each in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        first_row += len(batch)


def _learn(columns: dict[str, _Column], batch: list[Record], first_row: int) -> dict[str, list[Any]]:
    """Return the batch by columns, its types noted."""
    names = dict.fromkeys(name for record in batch for name in record)
    values = {name: [record.get(name) for record in batch] for name in names}
    for name in names:
        columns.setdefault(name, _Column()).learn(values[name], first_row)
    return values


def _array(field: pa.Field, values: list[Any] | None, length: int) -> pa.Array:
    if values is None:
        values = [None] * length
    if field.type == _MIXED:
        return _mixed_array(values)
    return _text_array(values) if pa.types.is_string(field.type) else pa.array(values, type=field.type)


def _mixed_field(name: str, problem: Problem) -> pa.Field:
    return with_problem(pa.field(name, _MIXED), problem)


def _mixed_array(values: Sequence[Any]) -> pa.Array:
    kinds = [None if value is None else kind_of(value) for value in values]
    return pa.StructArray.from_arrays([_text_array(values), pa.array(kinds, pa.string())], fields=list(_MIXED))


def _nested_field(name: str, word: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata={_NESTED_WORD: word})


def _text_array(values: Sequence[Any]) -> pa.Array:
    """Return texts as they are, other values as JSON."""
    if not set(map(type, values)) <= {str, type(None)}:
        values = [value if value is None else _text_of(value) for value in values]
    return pa.array(values, type=pa.string())


def _text_of(value: Any) -> str:
    """Return a text as it is, another value as JSON, and what JSON cannot hold as Python writes it."""
    if isinstance(value, str):
        return value
    is_json = isinstance(value, bool | int | float | dict | list | tuple)
    return _encode(value) if is_json else str(value)


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


def _num_fields(kind: pa.DataType) -> int:
    return 1 + sum(_num_fields(kind.field(number).type) for number in range(kind.num_fields))


def _kind_of_type(kind: type) -> str:
    return next((word for types, word in _KINDS if issubclass(kind, types)), f"a {kind.__name__}")


def _numbers(name: str, texts: pa.Array, faults: Faults) -> pa.Array:
    """Return JSON's numbers as whole ones, or as floats where one has a fraction; those too large are faults."""
    has_fractions = bool(pc.any(pc.match_substring_regex(texts, "[^-0-9]")).as_py())
    most = _MOST_WHOLE_AMONG_FRACTIONS if has_fractions else _MOST_WHOLE
    values: list[int | float | None] = []
    for row, text in enumerate(texts.to_pylist()):
        value = None if text is None else json.loads(text)
        if isinstance(value, int) and not -most - 1 <= value <= most:
            what = f"column `{name}` holds a whole number that is too large here"
            faults.setdefault(row, Problem(what=what, expected="at most 64 bits"))
            value = None
        values.append(value)
    return pa.array(values, type=pa.float64() if has_fractions else pa.int64())


def _without_halves(name: str, values: Sequence[Any], faults: Faults) -> list[Any]:
    """Return the values, missing where one holds half a character; `faults` takes why."""
    whole = list(values)
    for row, value in enumerate(whole):
        if not is_text(_text_of(value)):
            whole[row] = None
            faults.setdefault(row, _half(name))
    return whole


def _half(name: str) -> Problem:
    printable = name.encode(errors="backslashreplace").decode()
    return Problem(
        what=f"column `{printable}` holds half of a character (a lone surrogate such as \\ud83d), "
        "which no text can hold",
        fix="write the whole character, or remove it",
    )


def _why_not(name: str, values: Sequence[Any], locate: Locate, error: Exception) -> Problem:
    """Return the problem of the first value that differs in type from those before it, or that Arrow cannot hold."""
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
    """Return the position of the first value that Arrow cannot hold together with those before it."""
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
