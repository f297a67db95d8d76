"""Columns that are kept as text because no other type holds them: such a column is an error only where it is used.

What is wrong with it stands in the Arrow field, so that it goes wherever the table goes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from brim.data.blocks import BATCH_ROWS
from brim.errors import Problem

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
