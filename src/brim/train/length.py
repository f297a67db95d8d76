"""How long a run is: samples, steps, and after which steps it is evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from brim.batching.adaptation import Adaptation
from brim.batching.schedule import BatchSchedule, Phase, constant
from brim.batching.walk import num_steps, samples_of_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """A run in samples and steps. An epoch's last step takes the rows that are left, so it may be smaller."""

    num_rows: int  # of an epoch
    schedule: BatchSchedule  # where sizes follow what is measured: the first one
    total_samples: int  # rows that the whole run consumes, counted with repetition
    steps_per_checkpoint: int = 0  # 0: by checkpoints_per_epoch
    checkpoints_per_epoch: int = 1
    adaptation: Adaptation | None = None  # how sizes begin that follow what is measured
    notes: tuple[str, ...] = ()  # what a person should know of how it came about
    # What batch_increase_function answered, by epochs done and present size, so that it is asked nothing twice.
    increases: Mapping[tuple[int, int], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def total_steps(self) -> int | None:
        """None where it depends on what will be measured."""
        if self.adaptation is not None:
            return None
        return num_steps(self.schedule, num_rows=self.num_rows, total_samples=self.total_samples)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All that a step's batch can be declared to have, in order of size."""
        measured = () if self.adaptation is None else self.adaptation.ladder
        return tuple(sorted({*measured, *(phase.size for phase in self.schedule.phases)}))

    @property
    def largest_size(self) -> int:
        return self.sizes[-1]

    @property
    def batch_moves(self) -> bool:
        return self.adaptation is not None or not self.schedule.is_constant

    def is_checkpoint(self, step: int, *, samples_before: int, samples_after: int) -> bool:
        """Whether the run is evaluated and saved after this step, counted from 1, which consumes these samples."""
        if samples_after >= self.total_samples:
            return True
        if self.steps_per_checkpoint:
            return step % self.steps_per_checkpoint == 0
        return self._due_by(samples_after) > self._due_by(samples_before)

    def course(self) -> dict[str, Any]:
        """For checkpoints, as JSON: what a function of the user's, or the memory, may have decided."""
        phases = [[phase.first_sample, phase.size] for phase in self.schedule.phases]
        return {"phases": phases, "total_samples": self.total_samples}

    def with_course(self, saved: Mapping[str, Any]) -> RunLength:
        """The length with the course that a checkpoint holds."""
        phases = tuple(Phase(first_sample=first, size=size) for first, size in saved["phases"])
        return replace(self, schedule=BatchSchedule(phases=phases), total_samples=saved["total_samples"])

    def steps_until(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """Each step until so many samples are consumed: the samples before it, its rows, and those of its phase.

        Of a batch that does not follow what is measured.
        """
        consumed = 0
        while consumed < min(samples, self.total_samples):
            size = self.schedule.size_at(consumed)
            rows = min(size, self.num_rows - consumed % self.num_rows, self.total_samples - consumed)
            yield consumed, rows, size
            consumed += rows

    def _due_by(self, samples: int) -> int:
        """Checkpoints until then, of which each epoch has its number, evenly spread, the last at its end."""
        return samples * self.checkpoints_per_epoch // self.num_rows


def run_length(
    *,
    num_rows: int,
    effective_batch_size: int,
    epochs: int,
    train_steps: int | None = None,
    steps_per_checkpoint: int = 0,
    checkpoints_per_epoch: int = 0,
) -> RunLength:
    """The length of a run whose effective batch does not move. `train_steps` wins over `epochs`, as in Ludwig.

    Without a checkpoint key, there is one at each epoch's end. 0 means "not set".
    """
    schedule = constant(effective_batch_size)
    total_samples = epochs * num_rows
    if train_steps is not None:
        total_samples = samples_of_steps(schedule, num_rows=num_rows, num_steps=train_steps)
    return RunLength(
        num_rows=num_rows,
        schedule=schedule,
        total_samples=total_samples,
        steps_per_checkpoint=steps_per_checkpoint,
        checkpoints_per_epoch=max(checkpoints_per_epoch, 1),
    )
