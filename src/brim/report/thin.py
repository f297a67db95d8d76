"""Fewer points of a line that looks the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def thinned(values: NDArray[np.int64], *, most: int) -> NDArray[np.intp]:
    """Positions to keep, in order, at most `most`: the first and last, and each stretch's lowest and highest.

    values: [E]. So no spike is lost, however short.
    """
    num_points = len(values)
    if num_points <= most:
        return np.arange(num_points)
    edges = np.linspace(0, num_points, max((most - 2) // 2, 1) + 1).astype(int)
    kept = {0, num_points - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept |= {start + int(stretch.argmin()), start + int(stretch.argmax())}
    return np.array(sorted(kept), dtype=np.intp)
