"""The job in waves: as many of the longest prompts as fit, until all their responses are as long as they may be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.infer.cache_costs import CacheCosts
from brim.infer.room import Room
from brim.planning.pass_times import PassTimes

_COLUMNS_LOOKED_AT = 5  # of a wave's steps, from the first to the last; times lie on straight pieces between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """W waves, the longest prompts first; each [W]."""

    first: NDArray[np.int64]  # position of its first row among the rows by length
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]  # that its longest row needs

    def at(self, position: int) -> tuple[int, int]:
        """Rows and columns of the wave in which the row at this position is."""
        number = int(np.searchsorted(self.first, position, side="right")) - 1
        return int(self.rows[number]), int(self.columns[number])


def waves(lengths: NDArray[np.int64], room: Room, *, response_columns: int) -> Waves:
    """lengths: tokens of the prompts, the longest first. The cache of the first wave is that of all."""
    first, rows, columns = [], [], []
    position = cells = 0
    while position < len(lengths):
        needed = int(lengths[position]) + response_columns
        number = min(room.rows(needed, cells=cells), len(lengths) - position)
        if cells:
            number = min(number, max(cells // needed, 1))
        cells = cells or number * needed
        first.append(position)
        rows.append(number)
        columns.append(needed)
        position += number
    return Waves(first=np.array(first), rows=np.array(rows), columns=np.array(columns))


def seconds(of: Waves, costs: CacheCosts, times: PassTimes) -> float:
    """Where every response is as long as it may be, so that nobody's place becomes free before a wave is over."""
    longest = np.maximum(of.columns - costs.response_columns, 1)
    together = np.minimum(of.rows, np.maximum(costs.prefill_tokens // longest, 1))
    passes = -(-of.rows // together)
    prefill_s = float((passes * times.prefill_s(together * longest, longest)).sum())
    if costs.response_columns == 0:
        return prefill_s
    shares = np.linspace(0.0, 1.0, _COLUMNS_LOOKED_AT)
    a_step_s = np.mean([times.step_s(of.rows, longest + share * costs.response_columns) for share in shares], axis=0)
    return prefill_s + costs.response_columns * float(a_step_s.sum())
