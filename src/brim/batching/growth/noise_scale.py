"""Measure the gradient noise scale, and choose the effective batch that follows it.

The noise scale is the number of rows in a batch whose gradient is as much noise as signal: the simple noise scale tr
Σ / |G|² of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), section 2.2 and
appendix A, with G the gradient over all rows there could be and Σ the covariance of one row's. `Adaptation` moves the
effective batch one step of a ladder at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

_VOTES_TO_MOVE = 3


Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """Hold a batch size between bounds, and how many measurements in a row have asked for another.

    Up where the noise scale is at least the next rung, down where it is at most the rung below: after a move the noise
    scale has to change by a factor of two before the batch goes back.
    """

    size: int  # rows; between the bounds, at the start not necessarily a rung
    smallest: int  # rows, at least 1
    largest: int  # rows, at least `smallest`
    direction: Direction | None = None  # that the last measurements asked for
    num_votes: int = 0  # how many of them in a row

    def __post_init__(self) -> None:
        assert 1 <= self.smallest <= self.size <= self.largest, "a batch outside its bounds"

    @property
    def ladder(self) -> tuple[int, ...]:
        """Return the smallest batch, doubled again and again, and the largest exactly."""
        rungs = [self.smallest]
        while 2 * rungs[-1] < self.largest:
            rungs.append(2 * rungs[-1])
        return tuple(rungs) if rungs[-1] == self.largest else (*rungs, self.largest)

    def after(self, noise: NoiseScale) -> Adaptation:
        """Take in that one more measurement has been averaged into the noise scale."""
        direction, size = self._wish(noise)
        num_votes = 0 if direction is None else 1 + (self.num_votes if direction == self.direction else 0)
        if num_votes == _VOTES_TO_MOVE:
            return replace(self, size=size, direction=None, num_votes=0)
        return replace(self, direction=direction, num_votes=num_votes)

    def _wish(self, noise: NoiseScale) -> tuple[Direction | None, int]:
        """Return where to move, and the rung there."""
        above = next((rung for rung in self.ladder if rung > self.size), None)
        if above is not None and noise.is_at_least(above):
            return "up", above
        below = next((rung for rung in reversed(self.ladder) if rung < self.size), None)
        if below is not None and noise.is_at_most(below):
            return "down", below
        return None, self.size


NUM_GROUPS = 8


_HALF_LIFE_MEASUREMENTS = 10


_FEWEST_MEASUREMENTS = 5


_KEPT = 0.5 ** (1 / _HALF_LIFE_MEASUREMENTS)  # of a measurement's weight, with each one that follows


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeasurement:
    """Hold one step's estimates. Both are unbiased, and so either may come out below zero."""

    squared_gradient: float  # |G|²
    gradient_variance: float  # tr Σ, of one row's share: the variance of the batch's gradient, times its rows

    @classmethod
    def of(
        cls, *, squared_sum: float, squared_shares: Sequence[float], weights: Sequence[float], num_rows: int
    ) -> NoiseMeasurement | None:
        """Estimate from the gradient of a batch and those of its groups; None where these are too few, or not finite.

        squared_sum: squared norm of the batch's gradient, the weighted mean over its rows. squared_shares: of what each
        group adds to that sum. weights: of each group, by its supervised tokens, for instance. num_rows: of the batch.

        A group's share is sᵢ = pᵢG + noise, with pᵢ its part of the weight. The noises of two groups are independent,
        so that the inner product of two shares is pᵢpⱼ|G|² on average, and Σ over all pairs of them is |Σsᵢ|² − Σ|sᵢ|².
        That asks nothing of how the noise of a row depends on its weight, and needs no second gradient in memory. With
        equal groups it is the estimate of appendix A.1.
        """
        squares = sum(weight * weight for weight in weights) / sum(weights) ** 2
        if len(weights) < 2 or not squares < 1:
            return None
        squared_gradient = (squared_sum - math.fsum(squared_shares)) / (1 - squares)
        variance = num_rows * (squared_sum - squared_gradient)
        if not (math.isfinite(squared_gradient) and math.isfinite(variance)):
            return None
        return cls(squared_gradient=squared_gradient, gradient_variance=variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Average measurements over a run: a ratio of two averages, since the average of ratios would be biased.

    Each measurement weighs half as much ten measurements later. The averages are those of the measurements so far, with
    weights that add up to 1: nothing draws them towards a value at the start.
    """

    num_measurements: int = 0
    squared_gradient: float = 0.0  # averages
    gradient_variance: float = 0.0

    def after(self, measurement: NoiseMeasurement) -> NoiseScale:
        """Take in one more measurement."""
        number = self.num_measurements + 1
        weight = (1 - _KEPT) / (1 - _KEPT**number)  # the first one's is 1
        return NoiseScale(
            num_measurements=number,
            squared_gradient=_towards(self.squared_gradient, measurement.squared_gradient, weight),
            gradient_variance=_towards(self.gradient_variance, measurement.gradient_variance, weight),
        )

    @property
    def rows(self) -> float | None:
        """Return the noise scale; None where it is not known yet, or where no signal shows through the noise."""
        if not self._is_known or self.squared_gradient <= 0:
            return None
        return max(0.0, self.gradient_variance) / self.squared_gradient

    def is_at_least(self, rows: float) -> bool:
        """Say whether it is known to be at least so many rows: for any number where only noise is seen."""
        return self._is_known and 0 < self.gradient_variance >= rows * self.squared_gradient

    def is_at_most(self, rows: float) -> bool:
        """Say whether it is known to be at most so many rows."""
        known = self.rows
        return known is not None and known <= rows

    def in_words(self) -> str:
        """Say for logs why the batch moved, or did not."""
        if not self._is_known:
            return f"noise scale not known yet, after {self.num_measurements} of {_FEWEST_MEASUREMENTS} measurements"
        if self.rows is None:
            return "noise scale larger than the measured batches can tell"
        return f"noise scale {self.rows:.1f} rows"

    @property
    def _is_known(self) -> bool:
        return self.num_measurements >= _FEWEST_MEASUREMENTS


def _towards(average: float, value: float, weight: float) -> float:
    return average + weight * (value - average)
