"""Rows that are run together without gradients, as many as a cutter says: fewer once memory has run out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from brim.batching.caches import free_caches
from brim.batching.cutter import CapChange, Cutter
from brim.batching.microbatch import MicroBatch
from brim.data import TokenRows
from brim.infer.rows_at_once import Doing, Smaller, Work, fits, too_large

WINDOW_ROWS = 4096  # as planning/forward_plan.py has it; tests compare them


class RowsByCost:
    """Batches. One object serves all evaluations of a run: its limit only falls, and training has one of its own.

    on_smaller: called each time that the limit falls; what it raises ends the work.
    """

    def __init__(self, cutter: Cutter, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        self._cutter = cutter
        self._on_smaller = on_smaller

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """See Batches."""
        for start in range(0, len(order), WINDOW_ROWS):
            left = order[start : start + WINDOW_ROWS]
            while len(left):
                left = self._run_until_lowered(rows, left, work, doing)

    def _run_until_lowered(
        self, rows: TokenRows, positions: NDArray[np.intp], work: Work, doing: Doing
    ) -> NDArray[np.intp]:
        """The positions that are left, which are to be cut anew; none where all fitted."""
        batches = self._cutter.cut(rows.lengths[positions])
        for number, batch in enumerate(batches):
            taken = positions[batch.rows]
            if fits(work, taken):
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            change = self._cutter.lower(batch)
            if change is not None:
                self._tell(rows, taken, batch, change, doing)
                return np.concatenate([positions[each.rows] for each in batches[number:]])
            if not fits(work, taken, is_last=True):
                position = int(taken[0])
                raise too_large(key=int(rows.keys[position]), num_tokens=int(rows.lengths[position]), doing=doing)
        return positions[:0]

    def _tell(
        self, rows: TokenRows, positions: NDArray[np.intp], batch: MicroBatch, change: CapChange, doing: Doing
    ) -> None:
        keys = tuple(int(key) for key in rows.keys[positions])
        unit: Literal["rows", "bytes"] = "rows" if change.unit == "rows" else "bytes"
        self._on_smaller(Smaller(doing=doing, keys=keys, longest=batch.padded_length, after=change.after, unit=unit))
