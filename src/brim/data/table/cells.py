"""Read the cells of number, category and binary columns, a block at a time; what cannot be read is a row's fault.

Every column becomes numbers of 64 bits: a number as it is, a category or a truth value as the position of its text
among the column's texts, in the order in which they appear. NaN stands for a missing value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.config.text import shortened
from brim.data.read import RowFaults, Source, blocks, cell_texts, gather
from brim.errors import DataError, Problem

Floats: TypeAlias = npt.NDArray[np.float64]
Keys: TypeAlias = npt.NDArray[np.int64]
Strategy: TypeAlias = Literal[
    "error",
    "drop_row",
    "keep_row",  # of an output: the row teaches the other outputs alone
    "fill_with_const",
    "fill_with_mean",
    "fill_with_mode",
    "fill_with_false",
    "fill_with_true",
]
Normalization: TypeAlias = Literal["zscore", "minmax", "log1p", "iq"]


LARGEST = float(np.finfo(np.float32).max)  # a batch holds numbers of 32 bits


MOST_TEXTS = 1_000_000  # of a column; its texts are in memory, and no category has as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Describe an input or an output column as the configuration does, by Ludwig's names."""

    name: str
    column: str
    place: str  # "input_features[1]", for messages; an output's begins with "output_features"
    type: Literal["text", "number", "category", "binary"]
    missing_value_strategy: Strategy = "error"
    fill_value: str | float | None = None  # with fill_with_const
    max_sequence_length: int | None = None  # tokens of a text
    normalization: Normalization | None = "zscore"  # of a number
    outlier_strategy: Strategy | None = None  # of a number: any but `error` and `keep_row`
    outlier_threshold: float = 3.0  # standard deviations from the mean, both of the training split
    lowercase: bool = False  # of a category
    most_common: int = 10_000  # labels of a category input; all others are unknown
    encoder: Literal["onehot", "dense"] = "dense"  # of a category input
    fallback_true_label: str | None = None  # of a binary column whose values are not truth values
    class_weights: Mapping[str, float] = field(default_factory=dict)  # of a category or binary output, by label

    @property
    def is_output(self) -> bool:
        return self.place.startswith("output_features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Hold the cells of some rows as numbers, in a table that may lie on disk."""

    table: pa.Table  # `key`, ascending, and a column of float64 a feature, by its position
    texts: tuple[tuple[str, ...], ...]  # of each feature: what the numbers of a category or binary column stand for

    @property
    def keys(self) -> Keys:
        """Return the row numbers in the source."""
        return np.asarray(self.table["key"].to_numpy(), dtype=np.int64)

    def values(self, position: int) -> Floats:
        """Return a feature's numbers [rows]."""
        return np.asarray(self.table[str(position)].to_numpy(), dtype=np.float64)

    def blocks(self) -> Iterator[tuple[Keys, list[Floats]]]:
        """Give the rows a block at a time: their keys, and of each feature its numbers."""
        for batch in self.table.to_batches():
            if batch.num_rows:
                keys, *values = (column.to_numpy() for column in batch.columns)
                yield keys, values


def parse(source: Source, features: Sequence[Feature], keys: Keys, faults: RowFaults) -> Parsed:
    """Return the cells of these features in these rows (ascending). No feature is a text.

    faults: takes the rows with a number column's cell that is no finite number; such a cell is NaN.
    Raises DataError: a column of dates where numbers are wanted; one with more than MOST_TEXTS different values.
    """
    DataError.raise_for(_no_numbers(source, feature) for feature in features if not _may_hold(source, feature))
    texts: list[dict[str, int]] = [{} for _ in features]
    schema = pa.schema([("key", pa.int64()), *((str(number), pa.float64()) for number in range(len(features)))])

    def batches() -> Iterator[pa.RecordBatch]:
        table = source.table.select(list(dict.fromkeys(feature.column for feature in features)))
        for block_keys, block in blocks(table, keys):
            columns = [pa.array(block_keys)]
            for feature, known in zip(features, texts, strict=True):
                cells = block[feature.column]
                if feature.type == "number":
                    values, problems = numbers(cells, feature, has_comma=source.has_decimal_commas(feature.column))
                    for row, problem in problems.items():
                        faults.add(int(block_keys[row]), problem)
                else:
                    values = _text_numbers(cells, known, lowercase=feature.lowercase)
                    _require_few(known, feature, source)
                columns.append(pa.array(values))
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    table = gather(batches(), schema=schema) if features else pa.table({"key": keys})
    return Parsed(table=table, texts=tuple(map(tuple, texts)))


def numbers(cells: pa.ChunkedArray, feature: Feature, *, has_comma: bool = False) -> tuple[Floats, dict[int, Problem]]:
    """Return a column's cells as numbers, missing ones as NaN, and by row why a cell is none, which is NaN, too.

    has_comma: the cells are texts with a comma before the decimals.
    """
    problems: dict[int, Problem] = {}

    def refuse(rows: npt.NDArray[np.bool_], why: str, expected: str, fix: str = "correct the cell") -> None:
        for row in np.flatnonzero(rows).tolist():
            value = shortened(str(cells[row].as_py()))
            what = f"column `{feature.column}` holds {value!r}, {why}"
            problems.setdefault(row, Problem(what=what, expected=expected, fix=fix))

    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        texts = pc.utf8_trim_whitespace(cells)
        texts = pc.replace_substring(texts, ",", ".") if has_comma else texts
        is_number = pc.match_substring_regex(texts, _NUMBER).fill_null(False)
        is_other = pc.and_(pc.invert(is_number), pc.not_equal(texts, "").fill_null(False))
        fix = f"correct the cell, or set {feature.place}.type: category, if these are names"
        refuse(is_other.to_numpy(), "which is not a number", "a number such as 3, -0.5 or 1e6", fix)
        found = pc.if_else(is_number, texts, None).cast(pa.float64())
    else:
        found = cells.cast(pa.int8() if pa.types.is_boolean(cells.type) else cells.type).cast(pa.float64(), safe=False)
    values = np.array(found.to_numpy(), dtype=np.float64)
    refuse(np.isinf(values), "an infinite number", "a finite number")
    refuse(np.abs(values) > LARGEST, "a number beyond 32 bits", f"a number up to {LARGEST:.3g}")
    if feature.normalization == "log1p":
        refuse(values <= -1, "which has no log1p", "a number above -1")
    values[list(problems)] = np.nan
    return values, problems


# Words of infinity are read, so that the message says what is wrong.
_NUMBER = r"(?i)^[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)$"


def _may_hold(source: Source, feature: Feature) -> bool:
    """Return whether a column's type may hold what the feature wants; texts are looked at cell by cell."""
    kind = source.table.schema.field(feature.column).type
    is_plain = pa.types.is_null(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    is_fraction = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return feature.type != "number" or is_plain or is_fraction or is_text


def _no_numbers(source: Source, feature: Feature) -> Problem:
    kind = source.table.schema.field(feature.column).type
    what = f"column `{feature.column}`, which {feature.place} reads as a number, holds values of the type {kind}"
    return Problem(
        what=what, where=source.name, expected="numbers", fix="write what should be learned from as a number"
    )


def _text_numbers(cells: pa.ChunkedArray, known: dict[str, int], *, lowercase: bool) -> Floats:
    """Return for each cell the position of its text among the known ones, which grow; NaN where it is missing.

    White space around a text does not count, and an empty one is missing. A whole number is written without decimals,
    since a column of whole numbers becomes one of fractions where a cell is missing.
    """
    encoded = cells.combine_chunks().dictionary_encode()
    texts = [text.strip() for text in cell_texts(pa.chunked_array([encoded.dictionary]))]
    if pa.types.is_floating(cells.type):
        texts = [text.removesuffix(".0") for text in texts]
    texts = [text.lower() for text in texts] if lowercase else texts
    places = np.array([known.setdefault(text, len(known)) if text else np.nan for text in texts], dtype=np.float64)
    indices = encoded.indices.fill_null(len(texts)).to_numpy()
    return np.asarray(np.append(places, np.nan)[indices], dtype=np.float64)


def _require_few(known: Mapping[str, int], feature: Feature, source: Source) -> None:
    if len(known) > MOST_TEXTS:
        raise DataError(
            what=f"column `{feature.column}` holds more than {MOST_TEXTS:,} different values: too many for a category",
            where=source.name,
            expected="values of which each stands in many rows",
            fix=f"set {feature.place}.type: text or number, or leave the column out",
        )
