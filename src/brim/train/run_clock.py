"""Durations of one run in samples: what an epoch, a token or a share of the run comes to, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.data.order import rows_of_step
from brim.units import Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClock:
    """What durations are measured against."""

    lengths: NDArray[np.int64]  # real tokens of each row, in the order of the source
    seed: int  # of the rows' order
    total_samples: int  # of the whole run
    final_size: int  # rows of a step of the last phase, which `ba` counts

    def samples(self, duration: Duration) -> int:
        """Samples after which the duration is over, at least; of 1.5ep of 3 rows these are 5.

        Tokens are counted in the very order in which the run takes its rows.
        """
        if duration.unit == "tok":
            return self._samples_of_tokens(int(duration.amount))
        unit_samples = {
            "sp": 1,
            "ba": self.final_size,
            "ep": len(self.lengths),
            "dur": self.total_samples,
        }[duration.unit]
        product = duration.amount * unit_samples
        return -(-product.numerator // product.denominator)

    def _samples_of_tokens(self, num_tokens: int) -> int:
        num_rows = len(self.lengths)
        epochs, rest = divmod(num_tokens, int(self.lengths.sum()))
        if not rest:
            return epochs * num_rows
        _, order = rows_of_step(num_rows=num_rows, seed=self.seed, consumed_samples=epochs * num_rows, size=num_rows)
        return epochs * num_rows + int(np.searchsorted(np.cumsum(self.lengths[order]), rest)) + 1
