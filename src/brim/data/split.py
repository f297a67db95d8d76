"""Which rows are for training, validation and test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.data.order import random_order
from brim.errors import InputError, Problem

Split = Literal["train", "validation", "test", "full"]  # full: all rows
SPLITS = ("train", "validation", "test")
FIXED_VALUES = {
    "0": 0,
    "1": 1,
    "2": 2,
    "train": 0,
    "training": 0,
    "validation": 1,
    "valid": 1,
    "val": 1,
    "dev": 1,
    "test": 2,
}

_SPLITTING, _SAMPLING = 1, 2  # part of the entropy, so that the draws of one seed do not repeat each other

Codes = npt.NDArray[np.int8]  # 0 train, 1 validation, 2 test; one a row


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownSplit:
    """A value of a fixed split's column that names no split."""

    value: str
    rows: tuple[int, ...]


def check_split(name: str | None) -> Split | None:
    """Return a split's name as a person typed it. Raises InputError for one that does not exist."""
    for split in get_args(Split):
        if name == split:
            return cast(Split, split)
    if name is None:
        return None
    raise InputError(Problem(what=f"there is no split {name!r}", expected=", ".join(get_args(Split))))


def split_at_random(num_rows: int, probabilities: Sequence[float], *, seed: int) -> Codes:
    """Exactly the asked-for share of rows in each split (largest remainder), drawn by the seed."""
    return _dealt(random_order(num_rows, seed, _SPLITTING), probabilities)


def split_stratified(classes: Sequence[str], probabilities: Sequence[float], *, seed: int) -> Codes:
    """The asked-for share of the rows of each class in each split (largest remainder), drawn by the seed."""
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
    """A split from each text alone: the same on every machine, for any order and number of rows."""
    shares = np.cumsum(np.asarray(probabilities, dtype=np.float64))
    positions = np.fromiter((_digest(text) for text in texts), dtype=np.uint64).astype(np.float64) / 2.0**64
    return np.minimum(np.searchsorted(shares / shares[-1], positions, side="right"), len(SPLITS) - 1).astype(np.int8)


def split_as_given(texts: Sequence[str]) -> tuple[Codes, list[UnknownSplit]]:
    """A split from each row's own word for it; what is no such word is returned with its rows."""
    codes: Codes = np.zeros(len(texts), np.int8)
    unknown: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        code = FIXED_VALUES.get(normal_split_value(text))
        if code is None:
            unknown.setdefault(text, []).append(row)
        else:
            codes[row] = code
    return codes, [UnknownSplit(value=value, rows=tuple(rows)) for value, rows in unknown.items()]


def spellings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Splits that are written in more than one way, with the ways: {"train": ["0", "train"]}."""
    ways: dict[int, set[str]] = {}
    for value in {normal_split_value(text) for text in set(texts)}:
        if value in FIXED_VALUES:
            ways.setdefault(FIXED_VALUES[value], set()).add(value)
    return {SPLITS[code]: sorted(values) for code, values in sorted(ways.items()) if len(values) > 1}


def normal_split_value(text: str) -> str:
    """The value without what a spreadsheet adds: " Train" -> "train", "1.0" -> "1"."""
    value = text.strip().lower()
    return value[:-2] if value in ("0.0", "1.0", "2.0") else value


def sample(num_rows: int, size: int, *, seed: int) -> npt.NDArray[np.int64]:
    """`size` of the rows, drawn by the seed, in their order."""
    return np.sort(random_order(num_rows, seed, _SAMPLING)[:size])


def largest_remainder(num_rows: int, probabilities: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `num_rows`, each as near to its share as can be."""
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
