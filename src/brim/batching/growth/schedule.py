"""Compute the effective batch as a pure function of the samples that have been consumed.

A ramp leads from a first effective batch to the final one, upwards or downwards. The steps of a schedule are counted
in closed form: a phase of 1e12 samples costs as much as one of ten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


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
