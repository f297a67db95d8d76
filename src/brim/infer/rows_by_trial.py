"""Rows that are run together without gradients where nobody can say what they take: as many as trials have shown."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from brim.batching.caches import free_caches
from brim.batching.peak_meter import PeakMeter
from brim.data import TokenRows
from brim.infer.rows_at_once import Doing, Smaller, Work, fits, too_large

# An A100 reaches 90% of its speed at about 1,000 tokens of a batch, with weights in 4 bits at 4,000: beyond four times
# as many there is little to be had for the risk.
_ENOUGH_TOKENS = 16_384
_SHARE_OF_LIMIT = 0.9


class RowsByTrial:
    """Batches. The longest row runs alone; then twice as many tokens each time, while twice what was measured fits.

    After a lack of memory half as many, and never more again. Where the device does not say what it took, such a lack
    is what ends the growth.
    """

    def __init__(self, meter: PeakMeter, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        self._meter = meter
        self._on_smaller = on_smaller
        self._most_tokens = 1  # of several rows, padding included
        self._grows = True

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """See Batches; in this order."""
        done = 0
        has_retried = False
        while done < len(order):
            longest = int(rows.lengths[order[done]])
            positions = order[done : done + max(1, self._most_tokens // longest)]
            if self._tried(work, positions, len(positions) * longest, is_last=has_retried):
                done += len(positions)
                has_retried = False
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            if len(positions) > 1:
                self._shrink(rows, positions, longest, doing)
            elif has_retried:
                raise too_large(key=int(rows.keys[positions[0]]), num_tokens=longest, doing=doing)
            else:
                has_retried = True

    def _tried(self, work: Work, positions: NDArray[np.intp], num_tokens: int, *, is_last: bool) -> bool:
        if not self._grows:
            return fits(work, positions, is_last=is_last)
        self._meter.begin()
        before_bytes = self._meter.peak_bytes()
        if not fits(work, positions, is_last=is_last):
            return False
        peak_bytes, limit_bytes = self._meter.peak_bytes(), self._meter.limit_bytes()
        if before_bytes is not None and peak_bytes is not None and limit_bytes is not None:
            twice_bytes = before_bytes + 2 * (peak_bytes - before_bytes)
            self._grows = twice_bytes <= _SHARE_OF_LIMIT * limit_bytes
        if self._grows:
            self._most_tokens = min(2 * max(num_tokens, self._most_tokens), _ENOUGH_TOKENS)
            self._grows = self._most_tokens < _ENOUGH_TOKENS
        else:
            self._most_tokens = max(num_tokens, self._most_tokens)
        return True

    def _shrink(self, rows: TokenRows, positions: NDArray[np.intp], longest: int, doing: Doing) -> None:
        self._grows = False
        at_once = len(positions) // 2
        self._most_tokens = at_once * longest
        keys = tuple(int(key) for key in rows.keys[positions])
        self._on_smaller(Smaller(doing=doing, keys=keys, longest=longest, after=at_once))
