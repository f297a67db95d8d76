"""How many steps a schedule takes, counted in closed form: a phase of 1e12 samples costs as much as one of ten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from brim.batching.schedule import BatchSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The steps that a run makes in one phase."""

    size: int  # rows of a step
    first_sample: int  # consumed before its first step
    end_sample: int  # consumed after its last step
    num_steps: int  # at least 1

    @property
    def num_samples(self) -> int:
        return self.end_sample - self.first_sample


def stretches(schedule: BatchSchedule, *, num_rows: int, total_samples: int) -> Iterator[Stretch]:
    """What a run of so many samples makes of each phase that it reaches; O(phases).

    num_rows: of an epoch, whose last step takes what is left of it.
    A phase that lies within one step of the phase before it is never reached.
    """
    consumed = 0
    ends = [*(phase.first_sample for phase in schedule.phases[1:]), total_samples]
    for phase, end in zip(schedule.phases, ends, strict=True):
        until = min(end, total_samples)
        if consumed >= until:
            continue
        num_steps, reached = _until(consumed, phase.size, num_rows, until)
        reached = min(reached, total_samples)
        yield Stretch(size=phase.size, first_sample=consumed, end_sample=reached, num_steps=num_steps)
        consumed = reached


def num_steps(schedule: BatchSchedule, *, num_rows: int, total_samples: int) -> int:
    """Steps of a run of so many samples."""
    return sum(each.num_steps for each in stretches(schedule, num_rows=num_rows, total_samples=total_samples))


def samples_of_steps(schedule: BatchSchedule, *, num_rows: int, num_steps: int) -> int:
    """Samples that so many steps consume; O(phases)."""
    consumed, left = 0, num_steps
    for number, phase in enumerate(schedule.phases):
        if number + 1 < len(schedule.phases):
            until = schedule.phases[number + 1].first_sample
            if consumed >= until:
                continue
            steps, reached = _until(consumed, phase.size, num_rows, until)
            if steps <= left:
                consumed, left = reached, left - steps
                continue
        return _after(consumed, phase.size, num_rows, left)
    raise AssertionError("the last phase has no end")


def total_of_steps(schedule_for: Callable[[int], BatchSchedule], *, num_rows: int, num_steps: int) -> int:
    """The samples of a run of so many steps whose schedule depends on how many samples it has.

    schedule_for: the schedule of a run of a number of samples. A number that is not below what its own schedule
    consumes, while one less would be; the least of them where batches do not shrink. Shares of it are shares of the run
    but for a few batches: there need not be a number that its schedule consumes exactly.
    """
    low, high = 1, num_steps * num_rows
    while low < high:
        middle = (low + high) // 2
        if samples_of_steps(schedule_for(middle), num_rows=num_rows, num_steps=num_steps) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _until(consumed: int, size: int, num_rows: int, until: int) -> tuple[int, int]:
    """Steps of `size` rows until at least `until` samples are consumed, and how many those are."""
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
    """Samples that are consumed after so many more steps of `size` rows."""
    left_of_epoch = num_rows - consumed % num_rows
    steps_of_epoch = -(-left_of_epoch // size)
    if steps < steps_of_epoch:
        return consumed + steps * size
    steps, consumed = steps - steps_of_epoch, consumed + left_of_epoch
    epochs, rest = divmod(steps, -(-num_rows // size))
    return consumed + epochs * num_rows + min(rest * size, num_rows)
