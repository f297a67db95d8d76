"""How long the passes of generation take on a device: counted work, divided by its figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.memory.device_speed import DeviceSpeed
from brim.planning.roofline import roofline
from brim.planning.work_law import WorkLaw

WORTH = 0.02  # of the time of a row's token; rows that save less only make the last ones wait for each other
_PASSES = tuple(2**power for power in range(6, 13))  # tokens of a pass over prompts that are compared
_GAIN = 0.1  # of the time of a token; larger passes that save less are not worth theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds."""

    prefill: WorkLaw
    step: WorkLaw
    speed: DeviceSpeed

    def prefill_s(self, tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Of passes over so many tokens, of prompts of this length."""
        return roofline(self.prefill, self.speed, tokens, length).total_s

    def step_s(self, rows: ArrayLike, columns: ArrayLike) -> NDArray[np.float64]:
        """Of a token of every row."""
        return roofline(self.step, self.speed, rows, columns).total_s

    def rows_that_pay(self, columns: int, *, most: int) -> int:
        """The fewest rows with which a row's token takes hardly longer than with all of them."""
        rows = np.arange(1, most + 1)
        a_row_s = self.step_s(rows, columns) / rows
        return int(rows[np.flatnonzero(a_row_s <= (1 + WORTH) * a_row_s.min())[0]])

    def tokens_that_pay(self, length: int) -> int:
        """Tokens of a pass over prompts from which on a larger one is hardly faster."""
        tokens = np.array(_PASSES)
        a_token_s = self.prefill_s(tokens, length) / tokens
        return int(tokens[np.flatnonzero(a_token_s <= (1 + _GAIN) * a_token_s.min())[0]])
