"""What a row is known by, wherever it stands: its number, or the value of a column."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from brim.data import Source
from brim.data.blocks import blocks
from brim.data.prompt import cell_texts
from brim.data.source import places
from brim.errors import DataError, InputError, Problem

Keys = NDArray[np.uint64]


def row_keys(source: Source, rows: NDArray[np.int64], *, column: str | None) -> Keys:
    """64 bits for each of these rows (ascending numbers): the number, or a hash of the column's value as text.

    Raises DataError, with the first few places, for values that are missing or that several rows have; InputError for a
    column that is not there or holds no plain values.
    """
    if column is None:
        return rows.astype(np.uint64)
    _require_column(source, column)
    keys = np.zeros(len(rows), dtype=np.uint64)
    is_missing = np.zeros(len(rows), dtype=np.bool_)
    done = 0
    for block_rows, block in blocks(source.table.select([column]), rows):
        here = slice(done, done + len(block_rows))
        texts = cell_texts(block[column])
        keys[here] = [_hash(text) for text in texts]
        is_missing[here] = [not text for text in texts]
        done += len(block_rows)
    problems = [*_missing(source, column, rows[is_missing]), *_shared(source, column, rows, keys, is_missing)]
    if problems:
        raise DataError(*problems)
    return keys


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _require_column(source: Source, column: str) -> None:
    names = source.table.column_names
    if column not in names:
        raise InputError(
            Problem(
                what=f"there is no column `{column}` to know rows by",
                where=source.name,
                expected=", ".join(f"`{name}`" for name in names),
                fix="name one of them with --key, or leave it out: then rows are known by their numbers",
            )
        )
    kind = source.table.schema.field(column).type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise InputError(
            Problem(
                what=f"the column `{column}` holds {kind}, by which rows cannot be known",
                where=source.name,
                expected="texts or numbers",
                fix="name another column with --key",
            )
        )


def _missing(source: Source, column: str, rows: NDArray[np.int64]) -> list[Problem]:
    if not len(rows):
        return []
    return [
        Problem(
            what=f"{_rows(len(rows))} no value in `{column}`, by which rows are to be known",
            where=places(source, rows.tolist()),
            fix="fill it in, or leave out --key: then rows are known by their numbers",
        )
    ]


def _shared(
    source: Source, column: str, rows: NDArray[np.int64], keys: Keys, is_missing: NDArray[np.bool_]
) -> list[Problem]:
    """Of rows whose value an earlier row has, too."""
    here = np.flatnonzero(~is_missing)
    _, firsts = np.unique(keys[here], return_index=True)
    again = np.setdiff1d(here, here[firsts], assume_unique=True)
    if not len(again):
        return []
    first = int(again[0])
    earlier = int(rows[here[np.flatnonzero(keys[here] == keys[first])[0]]])
    value = cell_texts(source.table.select([column]).slice(int(rows[first]), 1)[column])[0]
    return [
        Problem(
            what=f"{_rows(len(again))} a value in `{column}` that an earlier row has, too: {value[:60]!r} stands in "
            f"{source.locate(earlier)} first",
            where=places(source, rows[again].tolist()),
            expected="a value of its own for each row",
            fix="make them differ, name another column, or leave out --key: then rows are known by their numbers",
        )
    ]


def _rows(count: int) -> str:
    return "1 row has" if count == 1 else f"{count:,} rows have"
