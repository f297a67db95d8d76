"""Which real rows stand for a shape when it is tried on a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rows_of_shape(lengths: NDArray[np.int64], *, rows: int, tokens: int) -> NDArray[np.intp]:
    """Positions of `rows` rows of at most `tokens` tokens, the longest of them, so that padding is least.

    lengths: tokens of each row of the data. A row is taken more than once where there are too few.
    """
    short_enough = np.flatnonzero(lengths <= tokens)
    assert len(short_enough), "a shape of the data has a row of its length"
    order = short_enough[np.argsort(-lengths[short_enough], kind="stable")]
    return np.resize(order, rows).astype(np.intp)
