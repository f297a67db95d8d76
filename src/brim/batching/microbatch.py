"""Cut one effective batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together."""

    rows: NDArray[np.intp]  # positions in the effective batch
    padded_length: int  # tokens of the longest row, to which the others are padded
    peak_bytes: int | None = None  # predicted; None: no prediction was asked
    seconds: float | None = None  # predicted

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def cut_by_rows(lengths: NDArray[np.integer], *, max_rows: int) -> Iterator[NDArray[np.intp]]:
    """Positions of each micro-batch: every row once, at most `max_rows` together, neighbours in length together.

    lengths: tokens of each row. The longest come first, so that a misfit shows at once. Since the loss is divided
    once by the tokens of the whole effective batch, the order changes padding and nothing else.
    """
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), max_rows):
        yield order[start : start + max_rows]
