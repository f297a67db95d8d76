"""A column of mixed types as the one type that most of its values have; rows with values of other types are faulty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from brim.data.as_text import nested_field
from brim.data.source import Source
from brim.errors import Problem

_NESTED = {"a list": "lists", "an object": "objects"}
_MOST_WHOLE = 2**63 - 1
_MOST_WHOLE_AMONG_FRACTIONS = 2**53  # a float holds no more


def of_one_type(source: Source, names: Sequence[str]) -> Source:
    """The source with those of these columns that are mixed as columns of one type, as if other rows were not there.

    What the cells of such a row were goes to the source's faults.
    """
    faults, table = dict(source.faults), source.table
    mixed = [name for name in dict.fromkeys(names) if name in source.kinds]
    for name in mixed:
        kinds = source.kinds[name].combine_chunks()
        kind = _commonest(kinds)
        field, values, too_large = _values(name, table[name].combine_chunks(), kinds, kind)
        for row in pc.indices_nonzero(pc.not_equal(kinds, kind)).to_pylist():
            faults.setdefault(row, _of_another_type(name, kinds[row].as_py(), kind))
        for row in too_large:
            faults.setdefault(row, _too_large(name))
        table = table.set_column(table.column_names.index(name), field, values)
    kinds_left = {name: kinds for name, kinds in source.kinds.items() if name not in mixed}
    return replace(source, table=table, faults=faults, kinds=kinds_left) if mixed else source


def _commonest(kinds: pa.Array) -> str:
    """The kind of most values; among equals text, else the first."""
    counts = {each["values"]: each["counts"] for each in pc.value_counts(kinds.drop_null()).to_pylist()}
    commonest: str = max(counts, key=lambda kind: (counts[kind], kind == "text"))
    return commonest


def _values(name: str, texts: pa.Array, kinds: pa.Array, kind: str) -> tuple[pa.Field, pa.Array, list[int]]:
    """The column with the values of one kind, and the rows of those that its type cannot hold."""
    own = pc.if_else(pc.equal(kinds, kind), texts, pa.scalar(None, pa.string()))
    if kind == "a number":
        numbers, too_large = _numbers(own)
        return pa.field(name, numbers.type), numbers, too_large
    if kind == "true or false":
        return pa.field(name, pa.bool_()), pc.equal(own, "true"), []
    return (nested_field(name, _NESTED[kind]) if kind in _NESTED else pa.field(name, pa.string())), own, []


def _numbers(texts: pa.Array) -> tuple[pa.Array, list[int]]:
    """JSON's numbers as whole ones, or as floats where one has a fraction; and the rows of those that are too large."""
    has_fractions = bool(pc.any(pc.match_substring_regex(texts, "[^-0-9]")).as_py())
    most = _MOST_WHOLE_AMONG_FRACTIONS if has_fractions else _MOST_WHOLE
    values: list[int | float | None] = []
    too_large = []
    for row, text in enumerate(texts.to_pylist()):
        value = None if text is None else json.loads(text)
        if isinstance(value, int) and not -most - 1 <= value <= most:
            too_large.append(row)
            value = None
        values.append(value)
    return pa.array(values, type=pa.float64() if has_fractions else pa.int64()), too_large


def _of_another_type(name: str, kind: str, common: str) -> Problem:
    return Problem(
        what=f"column `{name}` holds {kind} here and {common} in most rows", expected="one type in all rows of a column"
    )


def _too_large(name: str) -> Problem:
    return Problem(what=f"column `{name}` holds a whole number that is too large here", expected="at most 64 bits")
