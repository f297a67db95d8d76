"""Sample and split a source's rows as the configuration says."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from brim.config import Config, FixedSplit, HashSplit, RandomSplit
from brim.data.blocks import BATCH_ROWS
from brim.data.columns import missing, require_columns, require_text
from brim.data.prompt import cell_texts
from brim.data.source import Source, places
from brim.data.split import (
    Codes,
    UnknownSplit,
    sample,
    spellings,
    split_as_given,
    split_at_random,
    split_by_hash,
    split_stratified,
)
from brim.data.usable import usable
from brim.errors import DataError, Problem
from brim.notes import warning

Keys = npt.NDArray[np.int64]


def sampled_rows(source: Source, config: Config) -> Keys:
    """The rows that are used (sample_ratio, sample_size), in their order; none that has a fault."""
    keys, preprocessing = source.usable_rows(), config.preprocessing
    num_rows = len(keys)
    size = preprocessing.sample_size
    if size is None:
        size = max(1, round(num_rows * preprocessing.sample_ratio))
    return keys if size >= num_rows else keys[sample(num_rows, size, seed=config.random_seed)]


def with_usable_splits(source: Source, config: Config) -> Source:
    """The source with faults for the rows whose split column cannot be used, as preprocessing.on_bad_row says."""
    split = config.preprocessing.split
    return source if isinstance(split, RandomSplit) else usable(source, [split.column], config.preprocessing)


def assign_splits(source: Source, config: Config, keys: Keys, *, used: Collection[str] = ()) -> tuple[Codes, list[str]]:
    """The split of each of these rows, and notes. Raises DataError for a column that does not say.

    used: columns that are read as prompt or answer, whatever they are called.
    """
    split, seed = config.preprocessing.split, config.random_seed
    if isinstance(split, RandomSplit):
        notes: list[str] = []
        if "split" in source.table.column_names and "split" not in used:
            told = (
                "the data has a column `split`, which is not used, since preprocessing.split.type is random; "
                "to use it, set preprocessing.split: fixed"
            )
            notes.append(warning(told, topic="rows"))
        return split_at_random(len(keys), split.probabilities, seed=seed), notes
    _require_usable(source, split.column, keys)
    texts = _texts(source, split.column, keys)
    if isinstance(split, FixedSplit):
        return _as_given(source, split.column, keys, list(texts)), []
    if isinstance(split, HashSplit):
        return split_by_hash(texts, split.probabilities), []
    return split_stratified(list(texts), split.probabilities, seed=seed), []


def _require_usable(source: Source, column: str, keys: Keys) -> None:
    require_columns(source, {column: "preprocessing.split.column"})
    require_text(source, [column])
    empty = keys[missing(source.table[column])[keys]]
    if len(empty):
        raise DataError(
            Problem(
                what=f"column `{column}`, by which the data is split, is empty in {len(empty):,} "
                f"{'row' if len(empty) == 1 else 'rows'}",
                where=places(source, empty.tolist()),
                expected="a value in every row",
                fix="fill the cells, or split by another column or at random",
            )
        )


def _texts(source: Source, column: str, keys: Keys) -> Iterator[str]:
    cells = source.table[column]
    for start in range(0, len(cells), BATCH_ROWS):
        low, high = np.searchsorted(keys, [start, start + BATCH_ROWS])
        if low < high:
            texts = cell_texts(cells.slice(start, BATCH_ROWS))
            yield from (texts[key - start] for key in keys[low:high].tolist())


def _as_given(source: Source, column: str, keys: Keys, texts: list[str]) -> Codes:
    codes, unknown = split_as_given(texts)
    problems = [_unknown(source, column, keys, each) for each in unknown[:3]]
    if len(unknown) > 3:
        problems.append(
            Problem(
                what=f"column `{column}` holds {len(unknown) - 3:,} more values that are no split", where=source.name
            )
        )
    for split, ways in spellings(texts).items():
        problems.append(
            Problem(
                what=f"column `{column}` writes the {split} split in {len(ways)} ways: {', '.join(map(repr, ways))}",
                where=source.name,
                expected="one way of writing each split",
                fix="write it the same in all rows",
            )
        )
    if problems:
        raise DataError(*problems)
    return codes


def _unknown(source: Source, column: str, keys: Keys, unknown: UnknownSplit) -> Problem:
    rows = [int(keys[row]) for row in unknown.rows]
    return Problem(
        what=f"column `{column}` holds {unknown.value!r} in {len(rows):,} {'row' if len(rows) == 1 else 'rows'}, "
        "which is no split",
        where=places(source, rows),
        expected="0, 1, 2 or train, validation, test",
        fix="correct the cells, or name another column in preprocessing.split.column",
    )
