"""The labels that the model's texts stand for, beside those that the data has: what figures of a category are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.config.labels import LabelReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryPairs:
    """Of each row, in the order of the rows. Labels are positions in `labels`."""

    labels: tuple[str, ...]
    predicted: NDArray[np.int64]
    expected: NDArray[np.int64]
    is_fallback: NDArray[np.bool_]  # no rule found a label, and `predicted` is the fallback label

    @property
    def confusion(self) -> NDArray[np.int64]:
        """[expected, predicted]: rows of each pair of labels."""
        size = len(self.labels)
        counts = np.bincount(self.expected * size + self.predicted, minlength=size * size)
        return counts.reshape(size, size).astype(np.int64)


def category_pairs(responses: Sequence[str], references: Sequence[str], reader: LabelReader) -> CategoryPairs:
    """responses: the model's texts. references: labels of the data, white space around them aside; all are known."""
    positions = {label: position for position, label in enumerate(reader.labels)}
    readings = [reader.read(text) for text in responses]
    return CategoryPairs(
        labels=reader.labels,
        predicted=np.array([positions[reading.label] for reading in readings], dtype=np.int64),
        expected=np.array([positions[reference.strip()] for reference in references], dtype=np.int64),
        is_fallback=np.array([reading.is_fallback for reading in readings], dtype=np.bool_),
    )
