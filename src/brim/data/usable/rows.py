"""Decide which rows of a source are used, all that is wrong with the others, and to which split each row belongs.

A column of mixed types is taken as the one type that most of its values have; rows with values of other types are
faulty. Rows are sampled and assigned to training, validation and test as the configuration says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config.schema import (
    FixedSplit,
    HashSplit,
    PreprocessingConfig,
    RandomSplit,
)
from brim.data.read import BATCH_ROWS, SPLITS, RowFaults, Source, cell_texts, spellings, split_code
from brim.data.tokens import random_order
from brim.errors import DataError, Problem
from brim.notes import warning
from brim.units import format_count


def most_unasked(policy: PreprocessingConfig, num_rows: int) -> int:
    """Return how many of the rows `auto` leaves out at most."""
    return int(policy.max_dropped_fraction * num_rows + 1e-9)  # 0.29 × 100 is 29


def leaving_none_unasked(policy: PreprocessingConfig) -> PreprocessingConfig:
    """Return the policies for a prediction, which has to answer every row: under `auto`, any bad row is an error."""
    return policy.model_copy(update={"on_bad_row": "error"}) if policy.on_bad_row == "auto" else policy


def usable(source: Source, columns: Sequence[str], policy: PreprocessingConfig) -> Source:
    """Return the source with all of its rows; those that cannot be used are among its faults. Twice is as good as once.

    Where `on_bad_row` is `drop`, a row whose value in one of these columns is of another type than most is faulty, too;
    where it is `error`, using such a column is an error (see columns.py). `auto` is `drop` where such rows are
    few, else `error`.
    Raises DataError: under `error` for any faulty row, under `drop` when more than half are faulty.
    """
    num_rows, name, most = source.table.num_rows, source.name, most_unasked(policy, source.table.num_rows)
    if policy.on_bad_row != "error":
        cells = source.of_one_type(columns)
        if policy.on_bad_row == "drop" or len(cells.faults) <= most:
            RowFaults(locate=cells.locate, problems=dict(cells.faults)).require_minority(num_rows, name)
            return cells
    faults = RowFaults(locate=source.locate, problems=dict(source.faults))
    faults.settle("error", num_rows=num_rows, name=name, split_of=lambda key: None, most=most)
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Describe a column that is read: for which feature, and what happens where it is empty."""

    name: str
    feature: str  # INPUT or OUTPUT
    missing_value_strategy: str = "error"  # or drop_row; any other fills the cell
    fill_value: str = ""
    is_label: bool = False  # for a label, an empty text is a missing one

    def texts(self, table: pa.Table) -> list[str]:
        """Return the column's cells as text, missing ones filled."""
        return cell_texts(table[self.name], fill=self.fill_value)


def require_filled(source: Source, columns: Sequence[Column], rows: npt.NDArray[np.int64]) -> None:
    """Raise DataError for each column with missing cells in these rows whose strategy is `error`."""
    problems = []
    for column in columns:
        empty = rows[source.missing(column.name, is_label=column.is_label)[rows]]
        if len(empty) and column.missing_value_strategy == "error":
            count = format_count(len(empty), "row")
            problems.append(
                Problem(
                    what=f"column `{column.name}` is empty in {count}",
                    where=source.places(empty.tolist()),
                    expected="a value in every row",
                    fix=f"fill the cells, or set {column.feature}.preprocessing.missing_value_strategy "
                    "to drop_row or fill_with_const",
                )
            )
    DataError.raise_for(problems)


Keys = npt.NDArray[np.int64]


def sampled_rows(source: Source, policy: PreprocessingConfig, *, seed: int) -> Keys:
    """Return the rows that are used (sample_ratio, sample_size), in their order, without those that have a fault."""
    keys = source.usable_rows()
    num_rows = len(keys)
    size = policy.sample_size
    if size is None:
        size = max(1, round(num_rows * policy.sample_ratio))
    return keys if size >= num_rows else keys[sample(num_rows, size, seed=seed)]


def with_usable_splits(source: Source, policy: PreprocessingConfig) -> Source:
    """Return the source with faults for rows whose split column cannot be used, as preprocessing.on_bad_row says."""
    split = policy.split
    return source if isinstance(split, RandomSplit) else usable(source, [split.column], policy)


def assign_splits(
    source: Source, policy: PreprocessingConfig, keys: Keys, *, seed: int, used: Collection[str] = ()
) -> tuple[Codes, list[str]]:
    """Return the split of each of these rows, and notes. Raises DataError for a column that does not say it.

    used: columns that are read as prompt or answer, whatever they are called.
    """
    split = policy.split
    if isinstance(split, RandomSplit):
        notes: list[str] = []
        if "split" in source.table.column_names and "split" not in used:
            note = (
                "the data has a column `split`, which is not used, since preprocessing.split.type is random; "
                "to use it, set preprocessing.split: fixed"
            )
            notes.append(warning(note, topic="rows"))
        return split_at_random(len(keys), split.probabilities, seed=seed), notes
    _require_usable(source, split.column, keys)
    texts = _texts(source, split.column, keys)
    if isinstance(split, FixedSplit):
        return _as_given(source, split.column, keys, list(texts)), []
    if isinstance(split, HashSplit):
        return split_by_hash(texts, split.probabilities), []
    return split_stratified(list(texts), split.probabilities, seed=seed), []


def _require_usable(source: Source, column: str, keys: Keys) -> None:
    source.require_columns({column: "preprocessing.split.column"})
    source.require_text([column])
    empty = keys[source.missing(column)[keys]]
    if len(empty):
        raise DataError(
            what=f"column `{column}`, by which the data is split, is empty in {format_count(len(empty), 'row')}",
            where=source.places(empty.tolist()),
            expected="a value in every row",
            fix="fill the cells, or split by another column or at random",
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
    problems = [
        Problem(
            what=f"column `{column}` holds {value!r} in {format_count(len(rows), 'row')}, which is not a split",
            where=source.places(keys[rows].tolist()),
            expected="0, 1, 2 or train, validation, test",
            fix="correct the cells, or name another column in preprocessing.split.column",
        )
        for value, rows in list(unknown.items())[:3]
    ]
    if len(unknown) > 3:
        what = f"column `{column}` holds {len(unknown) - 3:,} more values that are not splits"
        problems.append(Problem(what=what, where=source.name))
    for split, ways in spellings(texts).items():
        problems.append(
            Problem(
                what=f"column `{column}` writes the {split} split in {len(ways)} ways: {', '.join(map(repr, ways))}",
                where=source.name,
                expected="one way of writing each split",
                fix="write it the same in all rows",
            )
        )
    DataError.raise_for(problems)
    return codes


_SPLITTING, _SAMPLING = 1, 2  # part of the entropy, so that the draws of one seed do not repeat each other


Codes = npt.NDArray[np.int8]  # 0 train, 1 validation, 2 test; one a row


def split_at_random(num_rows: int, probabilities: Sequence[float], *, seed: int) -> Codes:
    """Give each split exactly its share of the rows (largest remainder), drawn by the seed."""
    return _dealt(random_order(num_rows, seed, _SPLITTING), probabilities)


def split_stratified(classes: Sequence[str], probabilities: Sequence[float], *, seed: int) -> Codes:
    """Give each split its share of the rows of each class (largest remainder), drawn by the seed."""
    codes: Codes = np.zeros(len(classes), np.int8)
    # Not as a numpy array of text, in which every row would be as wide as the longest.
    class_numbers = pa.array(classes, pa.large_string()).dictionary_encode().indices.to_numpy()
    by_class = np.argsort(class_numbers, kind="stable")
    for rows in np.split(by_class, np.flatnonzero(np.diff(class_numbers[by_class])) + 1):
        if len(rows):
            entropy = _digest(classes[int(rows[0])])
            codes[rows] = _dealt(random_order(len(rows), seed, _SPLITTING, entropy), probabilities)
    return codes


def split_by_hash(texts: Iterable[str], probabilities: Sequence[float]) -> Codes:
    """Choose a split from each text alone: the same on every machine, for any order and number of rows."""
    shares = np.cumsum(np.asarray(probabilities, dtype=np.float64))
    positions = np.fromiter((_digest(text) for text in texts), dtype=np.uint64).astype(np.float64) / 2.0**64
    return np.minimum(np.searchsorted(shares / shares[-1], positions, side="right"), len(SPLITS) - 1).astype(np.int8)


def split_as_given(texts: Sequence[str]) -> tuple[Codes, dict[str, list[int]]]:
    """Return the split that each row names, and the words that name none, with their rows."""
    codes: Codes = np.zeros(len(texts), np.int8)
    unknown: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        code = split_code(text)
        if code is None:
            unknown.setdefault(text, []).append(row)
        else:
            codes[row] = code
    return codes, unknown


def sample(num_rows: int, size: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Draw `size` of the rows by the seed, and return them in their order."""
    return np.sort(random_order(num_rows, seed, _SAMPLING)[:size])


def largest_remainder(num_rows: int, probabilities: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `num_rows`, each as near to its share as can be."""
    shares = np.asarray(probabilities, dtype=np.float64)
    exact = num_rows * shares / shares.sum()
    counts = np.floor(exact + 1e-9).astype(np.int64)
    remainders = exact - counts
    for position in np.argsort(-remainders, kind="stable")[: num_rows - int(counts.sum())]:
        counts[position] += 1
    return [int(count) for count in counts]


def _dealt(order: npt.NDArray[np.int64], probabilities: Sequence[float]) -> Codes:
    codes: Codes = np.empty(len(order), np.int8)
    codes[order] = np.repeat(np.arange(len(SPLITS), dtype=np.int8), largest_remainder(len(order), probabilities))
    return codes


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
