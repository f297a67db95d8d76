r"""Represent cells that fit no Arrow type, and faults of rows, beside the table that they belong to.

Lone surrogates, such as \ud83d, are single parts of surrogate pairs, which JSON and Python can write and no text can
hold.

A column that no other type holds is kept as text; it is an error only where it is used. What is wrong with it stands
in the Arrow field, so that it stays with the table wherever the table goes. Why a row could not be read, and the type
of each cell of a mixed column, stand in hidden columns that only brim sees, for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from brim.data.read.spill import BATCH_ROWS
from brim.errors import Problem


def problem_of_record(record: Mapping[str, Any]) -> Problem | None:
    """What no table can hold of a JSON object: half a character in it, or a name that begins with NUL."""
    for name, cell in record.items():
        if name.startswith(MARK):
            return Problem(what="a column's name begins with the character NUL", fix="give the column another name")
        if not is_text(name) or not is_text(text_of(cell)):
            return _half(name)
    return None


def without_halves(name: str, values: Sequence[Any], faults: dict[int, Problem]) -> list[Any]:
    """The values, missing where one holds half a character; `faults` takes why."""
    whole = list(values)
    for row, value in enumerate(whole):
        if not is_text(text_of(value)):
            whole[row] = None
            faults.setdefault(row, _half(name))
    return whole


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _half(name: str) -> Problem:
    printable = name.encode(errors="backslashreplace").decode()
    return Problem(
        what=f"column `{printable}` holds half of a character (a lone surrogate such as \\ud83d), "
        "which no text can hold",
        fix="write the whole character, or remove it",
    )


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


_MOST_FIELDS = 64  # of an object's type; more are no fields, but keys that differ from row to row


_PROBLEM, _NESTED = b"brim.problem", b"brim.nested"


def mixed_field(name: str, problem: Problem) -> pa.Field:
    """A column whose values have no common type. problem: for those who use it."""
    return pa.field(name, pa.string(), metadata={_PROBLEM: json.dumps(asdict(problem))})


def nested_field(name: str, word: str) -> pa.Field:
    """A column of "lists" or "objects", kept as JSON: as Arrow types they would grow with each new key."""
    return pa.field(name, pa.string(), metadata={_NESTED: word})


def problem_of(field: pa.Field) -> Problem | None:
    """Why the values of a column have no common type; None where they have one."""
    stored = (field.metadata or {}).get(_PROBLEM)
    return None if stored is None else Problem(**json.loads(stored))


def nested_word(field: pa.Field) -> str:
    """ "lists" or "objects" where the column's text is JSON of these, else empty."""
    return str((field.metadata or {}).get(_NESTED, b"").decode())


def without_origin(field: pa.Field) -> pa.Field:
    """The field with nothing said of it but that its text is JSON."""
    word = nested_word(field)
    return nested_field(field.name, word) if word else pa.field(field.name, field.type)


def nested_values(texts: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The lists or objects of such a column."""
    return [None if text is None else json.loads(text) for text in texts.to_pylist()]


def nested_type(texts: pa.ChunkedArray) -> pa.DataType | None:
    """The Arrow type that holds all of such a column's values; None where none does, or one with very many fields."""
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


def _num_fields(kind: pa.DataType) -> int:
    return 1 + sum(_num_fields(kind.field(number).type) for number in range(kind.num_fields))


def text_array(values: Sequence[Any]) -> pa.Array:
    """Texts as they are, other values as JSON."""
    types = set(map(type, values))
    texts = values if types <= {str, type(None)} else [value if value is None else text_of(value) for value in values]
    return pa.array(texts, type=pa.string())


def text_of(value: Any) -> str:
    """A text as it is, another value as JSON, and what JSON cannot hold as Python writes it."""
    if isinstance(value, str):
        return value
    is_json = isinstance(value, bool | int | float | dict | list | tuple)
    return _encode(value) if is_json else str(value)


MARK = "\0"  # begins the names of hidden columns; readers refuse it in the data's own names


FAULT = f"{MARK}fault"


_KIND = f"{MARK}kind:"


def fault_text(problem: Problem) -> str:
    """A problem as a cell of the column FAULT."""
    return json.dumps(asdict(problem))


def kind_field(name: str) -> pa.Field:
    """The hidden column with the kinds ("text", "a number", …) of a mixed column's cells."""
    return pa.field(_KIND + name, pa.string())


def kind_of_column(field: pa.Field) -> str | None:
    """The mixed column to which a field's kinds belong; None for other fields."""
    name: str = field.name
    return name.removeprefix(_KIND) if name.startswith(_KIND) else None


def shown(table: pa.Table) -> pa.Table:
    """The table without its hidden columns."""
    hidden = [name for name in table.column_names if name.startswith(MARK)]
    return table.drop_columns(hidden) if hidden else table


def faults_of(table: pa.Table) -> dict[int, Problem]:
    """The rows that could not be read, by row number."""
    if FAULT not in table.column_names:
        return {}
    faults: dict[int, Problem] = {}
    first_row = 0
    for chunk in table[FAULT].chunks:
        rows = chunk.is_valid().to_numpy(zero_copy_only=False).nonzero()[0].tolist()
        faults |= {first_row + row: Problem(**json.loads(chunk[row].as_py())) for row in rows}
        first_row += len(chunk)
    return faults


def kinds_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The kinds of the cells of each mixed column."""
    named = {kind_of_column(field): table[field.name] for field in table.schema}
    return {name: kinds for name, kinds in named.items() if name is not None}


def cell_texts(column: pa.ChunkedArray, *, fill: str = "") -> list[str]:
    """Cells as text: numbers as Python writes them ("3", "0.5"), "True" and "False", dates as 2024-01-31."""
    if pa.types.is_floating(column.type) and column.type != pa.float64():
        cells = list(column.to_numpy())  # numpy writes a float32 as short as it can be: 0.1
        return [fill if cell is None or cell != cell else str(cell) for cell in cells]
    cells = column.to_pylist()
    return [fill if cell is None or cell != cell else str(cell) for cell in cells]
