"""Compute the effective batch as a function of the samples that have been consumed, or by the gradient's noise.

A ramp leads from a first effective batch to the final one, upwards or downwards. The steps of a schedule are counted
in closed form: a phase of 1e12 samples costs as much as one of ten.

The noise scale is the number of rows in a batch whose gradient is as much noise as signal: the simple noise scale tr
Σ / |G|² of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), section 2.2 and
appendix A, with G the gradient over all rows there could be and Σ the covariance of one row's. `Adaptation` moves the
effective batch one step of a ladder at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Hold the steps that a run makes in one phase."""

    size: int  # rows of a step
    first_sample: int  # consumed before its first step
    end_sample: int  # consumed after its last step
    num_steps: int  # at least 1

    @property
    def num_samples(self) -> int:
        return self.end_sample - self.first_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Hold one effective batch, and where it begins."""

    first_sample: int  # consumed samples from which on it holds
    size: int  # rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """Hold the phases of a run, in order; the first begins at 0, and neighbours differ in size.

    A step belongs to the phase in which it begins, and takes that phase's rows in full: where a phase's samples are no
    multiple of its size, its last step reaches into the next one. So no sample is dropped, and no step is cut short but
    at the end of an epoch or of the run.
    """

    phases: tuple[Phase, ...]

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return a schedule of one size."""
        return cls(phases=(Phase(first_sample=0, size=size),))

    @classmethod
    def of(cls, steps: Iterable[tuple[int, int]]) -> BatchSchedule:
        """Make a schedule from (first sample, size) in order; of those that begin together the last counts.

        Neighbours of one size become one phase.
        """
        phases: list[Phase] = []
        for first_sample, size in steps:
            assert size > 0, "a batch holds at least one row"
            if phases and phases[-1].first_sample == first_sample:
                phases.pop()
            if not phases or phases[-1].size != size:
                phases.append(Phase(first_sample=first_sample, size=size))
        assert phases, "a schedule has a phase"
        assert phases[0].first_sample == 0, "a schedule begins with the run"
        assert all(a.first_sample < b.first_sample for a, b in pairwise(phases)), "phases in order"
        return cls(phases=tuple(phases))

    @classmethod
    def doubling(cls, *, initial: int, final: int, length_samples: int) -> BatchSchedule:
        """Double the batch at each stage, or halve it; the stages share the samples of the ramp equally.

        The final batch follows the last stage that falls short of it, exactly, whatever the ratio is: from 6 to 20 the
        stages are 6 and 12. So counts bert24's pull request 76, whose ratios are powers of two.
        """
        stages = _doubled(initial, final)
        return _staged(stages, [1] * len(stages), final, length_samples)

    @classmethod
    def equal_steps(cls, *, initial: int, final: int, length_samples: int) -> BatchSchedule:
        """Take the stages of `doubling`, each with the same number of steps, so that small batches take few samples."""
        stages = _doubled(initial, final)
        return _staged(stages, stages, final, length_samples)

    @classmethod
    def linear(cls, *, initial: int, final: int, length_samples: int, increment: int = 1) -> BatchSchedule:
        """Add so many rows, or take them away, at each of equal parts, as Megatron's `--rampup-batch-size` has it.

        Where the increment does not divide the distance, the last one is smaller, so that the final batch is exact.
        """
        stages = list(range(initial, final, increment if final > initial else -increment))
        return _staged(stages, [1] * len(stages), final, length_samples)

    def size_at(self, consumed_samples: int) -> int:
        """Return the rows of the step that begins there."""
        return self.phases[self.index_at(consumed_samples)].size

    def index_at(self, consumed_samples: int) -> int:
        """Return the number of the phase, from 0, to which the step belongs that begins there."""
        return bisect_right(self.phases, consumed_samples, key=lambda phase: phase.first_sample) - 1

    @property
    def final_size(self) -> int:
        """Return the rows of a step of the last phase, to which learning rates are relative."""
        return self.phases[-1].size

    @property
    def is_constant(self) -> bool:
        return len(self.phases) == 1

    def stretches(self, *, num_rows: int, total_samples: int) -> Iterator[Stretch]:
        """Yield the steps that a run of so many samples makes in each phase that it reaches; O(phases).

        num_rows: of an epoch, whose last step takes what is left of it.
        A phase that lies within one step of the phase before it is never reached.
        """
        consumed = 0
        ends = [*(phase.first_sample for phase in self.phases[1:]), total_samples]
        for phase, end in zip(self.phases, ends, strict=True):
            until = min(end, total_samples)
            if consumed < until:
                num_steps, reached = _until(consumed, phase.size, num_rows, until)
                first, consumed = consumed, min(reached, total_samples)
                yield Stretch(size=phase.size, first_sample=first, end_sample=consumed, num_steps=num_steps)

    def num_steps(self, *, num_rows: int, total_samples: int) -> int:
        """Count the steps of a run of so many samples."""
        return sum(each.num_steps for each in self.stretches(num_rows=num_rows, total_samples=total_samples))

    def samples_of_steps(self, *, num_rows: int, num_steps: int) -> int:
        """Count the samples that so many steps consume; O(phases)."""
        left = num_steps
        for each in self.stretches(num_rows=num_rows, total_samples=num_steps * num_rows):
            if left <= each.num_steps:
                return _after(each.first_sample, each.size, num_rows, left)
            left -= each.num_steps
        return 0


def _doubled(initial: int, final: int) -> list[int]:
    """Return the sizes before the final one."""
    stages = []
    size = initial
    while (size < final) if initial < final else (size > final):
        stages.append(size)
        size = 2 * size if initial < final else -(-size // 2)
    return stages


def _staged(stages: Sequence[int], shares: Sequence[int], final: int, length_samples: int) -> BatchSchedule:
    """Give the stages their shares of the length; a stage begins with the first whole sample of its share."""
    whole, before = sum(shares), 0
    steps = []
    for size, share in zip(stages, shares, strict=True):
        steps.append((-(-before * length_samples // whole), size))
        before += share
    return BatchSchedule.of([*steps, (length_samples if stages else 0, final)])


def _until(consumed: int, size: int, num_rows: int, until: int) -> tuple[int, int]:
    """Count the steps of `size` rows until at least `until` samples are consumed, and those samples."""
    left_of_epoch = num_rows - consumed % num_rows
    if until - consumed <= left_of_epoch:
        steps = -(-(until - consumed) // size)
        return steps, consumed + min(steps * size, left_of_epoch)
    steps, consumed = -(-left_of_epoch // size), consumed + left_of_epoch
    epochs = (until - consumed) // num_rows
    steps, consumed = steps + epochs * -(-num_rows // size), consumed + epochs * num_rows
    rest = -(-(until - consumed) // size)
    return steps + rest, consumed + min(rest * size, num_rows)


def _after(consumed: int, size: int, num_rows: int, steps: int) -> int:
    """Count the samples that are consumed after so many more steps of `size` rows."""
    left_of_epoch = num_rows - consumed % num_rows
    steps_of_epoch = -(-left_of_epoch // size)
    if steps < steps_of_epoch:
        return consumed + steps * size
    steps, consumed = steps - steps_of_epoch, consumed + left_of_epoch
    epochs, rest = divmod(steps, -(-num_rows // size))
    return consumed + epochs * num_rows + min(rest * size, num_rows)


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
