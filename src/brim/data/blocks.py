"""Chosen rows of a table, a block at a time, so that a large one is never in memory whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BATCH_ROWS = 1024

Keys = npt.NDArray[np.int64]


def blocks(table: pa.Table, keys: Keys) -> Iterator[tuple[Keys, pa.Table]]:
    """These rows (ascending) in batches, each with its keys."""
    for start in range(0, table.num_rows, BATCH_ROWS):
        low, high = np.searchsorted(keys, [start, start + BATCH_ROWS])
        if low < high:
            yield keys[low:high], table.slice(start, BATCH_ROWS).combine_chunks().take(pa.array(keys[low:high] - start))
