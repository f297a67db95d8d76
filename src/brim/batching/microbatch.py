"""Cut one effective batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def cut_by_rows(lengths: NDArray[np.integer], *, max_rows: int) -> Iterator[NDArray[np.intp]]:
    """Positions of each micro-batch: every row once, at most `max_rows` together, neighbours in length together.

    lengths: tokens of each row. The longest come first, so that a misfit shows at once. Since the loss is divided
    once by the tokens of the whole effective batch, the order changes padding and nothing else.
    """
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), max_rows):
        yield order[start : start + max_rows]
