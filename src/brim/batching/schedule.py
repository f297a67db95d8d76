"""The effective batch as a pure function of the samples that have been consumed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a run with one effective batch."""

    first_sample: int  # consumed samples from which on it holds
    size: int  # rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The phases of a run, in order; the first begins at 0, and neighbours differ in size.

    A step belongs to the phase in which it begins, and takes that phase's rows in full: where a phase's samples are no
    multiple of its size, its last step reaches into the next one. So no sample is dropped, and no step is cut short but
    at the end of an epoch or of the run.
    """

    phases: tuple[Phase, ...]

    def size_at(self, consumed_samples: int) -> int:
        """Rows of the step that begins there."""
        return self.phases[self.index_at(consumed_samples)].size

    def index_at(self, consumed_samples: int) -> int:
        """The number of the phase that the step belongs to that begins there, from 0."""
        return bisect_right(self.phases, consumed_samples, key=lambda phase: phase.first_sample) - 1

    @property
    def final_size(self) -> int:
        """Rows of a step of the last phase, to which learning rates are relative."""
        return self.phases[-1].size

    @property
    def largest_size(self) -> int:
        return max(phase.size for phase in self.phases)

    @property
    def is_constant(self) -> bool:
        return len(self.phases) == 1


def constant(size: int) -> BatchSchedule:
    """One size for the whole run."""
    return BatchSchedule(phases=(Phase(first_sample=0, size=size),))


def schedule_of(steps: Iterable[tuple[int, int]]) -> BatchSchedule:
    """A schedule from (first sample, size) in order; of those that begin together the last counts.

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
    return BatchSchedule(phases=tuple(phases))
