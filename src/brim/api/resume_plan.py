"""From which step a resumption is tried, and where it is disturbed: decided from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brim.errors import InputError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a run goes."""

    total_steps: int | None  # None: the batch sizes are measured in the course of it
    total_samples: int
    largest_size: int  # rows of a step, at most
    logged_steps: int  # that it has made so far

    def steps_left(self, step: int, consumed_samples: int) -> int:
        """After this step; at least, where it cannot be known."""
        if self.total_steps is not None:
            return max(0, self.total_steps - step)
        left = max(0, -(-(self.total_samples - consumed_samples) // self.largest_size))
        return max(left, self.logged_steps - step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where both runs begin."""

    checkpoint: int  # the step whose checkpoint of the run is used; 0: none, the run starts anew
    step: int  # after which they go on; made once from the checkpoint, where it is another
    num_steps: int  # that each of them makes

    @property
    def num_leading(self) -> int:
        """Steps that are made once, before the two part."""
        return self.step - self.checkpoint


def choose_start(
    consumed_by_checkpoint: Mapping[int, int], reach: Reach, *, steps: int, from_step: int | None
) -> Start:
    """consumed_by_checkpoint: of each whole checkpoint, by its step. from_step: as asked for; None: the newest
    checkpoint that leaves enough steps, else the run's first step.

    Raises InputError where no step is left to be made twice.
    """
    consumed_by_checkpoint = {0: 0, **consumed_by_checkpoint}
    enough = [s for s, consumed in consumed_by_checkpoint.items() if s and reach.steps_left(s, consumed) >= steps]
    # Nothing is saved before the first step: a run that is killed in it starts anew, and is planned anew.
    step = max(1, from_step if from_step is not None else max(enough, default=1))
    checkpoint = max(s for s in consumed_by_checkpoint if s <= step)
    left = reach.steps_left(checkpoint, consumed_by_checkpoint[checkpoint]) - (step - checkpoint)
    if left < 1:
        raise InputError(_nothing_left(reach, step, from_step))
    return Start(checkpoint=checkpoint, step=step, num_steps=min(steps, left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Steps of the run at which it is disturbed."""

    stop_after: int | None  # Ctrl-C in this step, which is still made; None: where there is but one step
    kill_in: int  # SIGKILL in the middle of this one


def choose_disturbance(start_step: int, sizes: Sequence[int], cuts: Sequence[int]) -> Disturbance:
    """sizes: the effective batch of each step that is made, in order; cuts: its micro-batches.

    Where the size changes, the run is stopped right before, and killed in the first step of the new size. Where steps
    have several micro-batches, it is killed in one of these, so that a part of a gradient is lost.
    """
    num_steps = len(sizes)
    changes = [number for number in range(1, num_steps) if sizes[number] != sizes[number - 1]]
    before = changes[0] if changes else num_steps // 3 or min(1, num_steps - 1)
    wanted = before if changes else before + (num_steps - before - 1) // 2
    later = [*range(wanted, num_steps), *range(before, wanted)]
    kill = next((number for number in later if cuts[number] > 1), wanted)
    return Disturbance(stop_after=start_step + before if before else None, kill_in=start_step + kill + 1)


def _nothing_left(reach: Reach, step: int, from_step: int | None) -> Problem:
    known = "" if reach.total_steps is None else f": the run has {reach.total_steps:,}"
    return Problem(
        what=f"no step is left after step {step:,}{known}",
        where="--from-step" if from_step is not None else "",
        expected="a step after which the run goes on" if from_step else "a run of at least two steps",
        fix="name an earlier step with --from-step" if from_step else "try it on a longer run",
    )
