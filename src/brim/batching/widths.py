"""How many rows of a length fit together under a cap, and how long a row may be to fit at all."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs

_LONGEST_TOKENS = 1 << 20
_FEW_ROWS = 64  # so few are looked at one by one


def rows_that_fit(costs: Costs, lengths: ArrayLike, *, cap_bytes: int, most: int) -> NDArray[np.int64]:
    """For each length the most rows of which neither they nor any fewer are over the cap; 0: not even one fits.

    lengths: tokens, at least 1 each, in one dimension. most: rows beyond which nobody asks.
    Between two kinks the peak is a straight line in the rows, so that a number of rows beside a kink is over the cap
    wherever any is: no rise and fall of the peak is overlooked.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    turns = _turns(costs, tokens, most)
    over = costs.peak_bytes(turns, tokens[:, None]) > cap_bytes
    first = np.where(over.any(axis=1), over.argmax(axis=1), turns.shape[1])
    bounds = np.concatenate([np.zeros_like(turns[:, :1]), turns, np.full_like(turns[:, :1], most + 1)], axis=1)
    fit = np.take_along_axis(bounds, first[:, None], axis=1)[:, 0]
    too_many = np.take_along_axis(bounds, first[:, None] + 1, axis=1)[:, 0]
    while np.any(too_many - fit > 1):
        middle = (fit + too_many) // 2
        is_over = costs.peak_bytes(np.maximum(middle, 1), tokens) > cap_bytes
        is_open = too_many - fit > 1
        too_many = np.where(is_open & is_over, middle, too_many)
        fit = np.where(is_open & ~is_over, middle, fit)
    return fit


def _turns(costs: Costs, tokens: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """[length, …] ascending numbers of rows, from 1 to `most`, between which the peak is a straight line."""
    if most <= _FEW_ROWS:
        return np.broadcast_to(np.arange(1, most + 1), (len(tokens), most))
    per_row = costs.peak.kinks / tokens[:, None]
    ones = np.ones((len(tokens), 1))
    turns = np.concatenate([ones, np.floor(per_row), np.ceil(per_row), ones * most], axis=1)
    return np.sort(np.clip(turns, 1, most).astype(np.int64), axis=1)


def longest_row_that_fits(costs: Costs, cap_bytes: int, *, rows: int = 1, up_to: int = _LONGEST_TOKENS) -> int:
    """Tokens of the longest row that fits, as do all shorter ones; 0: none does.

    rows: of this length, together. up_to: where the search ends.
    """
    start, stop = 1, min(4096, up_to)
    while start <= up_to:
        lengths = np.arange(start, stop + 1)
        over = costs.peak_bytes(rows, lengths) > cap_bytes
        if over.any():
            return int(lengths[over.argmax()]) - 1
        start, stop = stop + 1, min(2 * stop, up_to)
    return up_to
