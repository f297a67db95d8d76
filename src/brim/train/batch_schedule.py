"""The length of a run and the course of its effective batch, as the trainer's keys ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from brim.batching.adaptation import Adaptation
from brim.batching.ramps import doubling, equal_steps, linear
from brim.batching.schedule import BatchSchedule, constant, schedule_of
from brim.batching.walk import samples_of_steps, total_of_steps
from brim.config import FinetuneTrainer
from brim.config.batch_steps import parse_batch_steps
from brim.data import TokenRows
from brim.train.increase_function import Increases, expand, load_increase_function
from brim.train.length import RunLength
from brim.train.run_clock import RunClock
from brim.units import Duration, format_count, parse_duration

_ScheduleFor = Callable[[int], BatchSchedule]  # of a run of so many samples


def length_of(
    trainer: FinetuneTrainer,
    rows: TokenRows,
    *,
    seed: int,
    bound: int | None = None,
    course: Mapping[str, Any] | None = None,
    known: Mapping[tuple[int, int], int] | None = None,
) -> RunLength:
    """Samples, phases and checkpoints of a run over these rows; O(phases), however long it is.

    seed: of the rows' order. bound: rows that trainer.batch_increase_function may not exceed; None: any number.
    course: what RunLength.course gave when the run began; then neither that function nor the memory is asked again.
    known: what that function answered already (RunLength.increases).
    Raises InputError where that function cannot be used.
    """
    length = RunLength(
        num_rows=len(rows),
        schedule=constant(1),
        total_samples=len(rows),
        steps_per_checkpoint=trainer.steps_per_checkpoint,
        checkpoints_per_epoch=max(trainer.checkpoints_per_epoch, 1),
        adaptation=_adaptation(trainer),
    )
    if course is not None:
        return length.with_course(course)
    if trainer.batch_increase_function is not None:
        return _with_increases(length, trainer, bound, known)
    return _with_schedule(length, trainer, _schedule_for(trainer, rows, seed))


def _with_schedule(length: RunLength, trainer: FinetuneTrainer, schedule_for: _ScheduleFor) -> RunLength:
    """`train_steps` wins over `epochs`, as in Ludwig."""
    num_rows, num_steps = length.num_rows, trainer.train_steps
    if num_steps is None:
        total_samples = _samples(trainer, num_rows)
        return replace(length, schedule=schedule_for(total_samples), total_samples=total_samples)
    schedule = schedule_for(total_of_steps(schedule_for, num_rows=num_rows, num_steps=num_steps))
    total_samples = samples_of_steps(schedule, num_rows=num_rows, num_steps=num_steps)
    return replace(length, schedule=schedule, total_samples=total_samples)


def _samples(trainer: FinetuneTrainer, num_rows: int) -> int:
    return trainer.train_samples or trainer.epochs * num_rows


def _with_increases(
    length: RunLength, trainer: FinetuneTrainer, bound: int | None, known: Mapping[tuple[int, int], int] | None
) -> RunLength:
    """The sizes that the user's function gives; what the bound did not allow is noted."""
    num_rows, num_steps = length.num_rows, trainer.train_steps
    assert isinstance(trainer.effective_batch_size, int), "resolved before"
    assert trainer.batch_increase_function is not None, "asked where there is one"
    limits = [limit for limit in (bound, trainer.max_batch_size) if limit is not None]
    increases = expand(
        load_increase_function(trainer.batch_increase_function),
        first_size=trainer.effective_batch_size,
        num_rows=num_rows,
        num_samples=None if num_steps is not None else _samples(trainer, num_rows),
        num_steps=num_steps,
        bound=min(limits, default=None),
        known=known,
    )
    notes = [*_refusals(increases, bound, trainer.max_batch_size), *_idle(increases, trainer.effective_batch_size)]
    length = replace(length, notes=tuple(notes), increases=increases.answers)
    return _with_schedule(length, trainer, lambda samples: increases.schedule)


def _refusals(increases: Increases, bound: int | None, largest: int | None) -> Iterator[str]:
    fits = f"{bound or 0:,} of the longest fit at once"
    is_key = largest is not None and (bound is None or largest <= bound)
    reason = f"trainer.max_batch_size is {largest:,}" if is_key else fits
    for refused in increases.refused[:1]:
        num_more = len(increases.refused) - 1
        more = f", nor {'was' if num_more == 1 else 'were'} {num_more:,} later" if num_more else ""
        when = f"after epoch {refused.num_epochs:,}" if refused.num_epochs else "for the first epoch"
        yield (
            f"trainer.batch_increase_function asked for {format_count(refused.size, 'row')} {when}, and {reason}: it "
            f"was not followed{more}"
        )


def _idle(increases: Increases, first_size: int) -> Iterator[str]:
    """That the function never asked for another batch, where it did not: perhaps it waits for an epoch that is none."""
    schedule, last = increases.schedule, increases.num_epochs - 1
    if schedule.is_constant and schedule.final_size == first_size and not increases.refused:
        epochs = f"each epoch from 0 to {last:,}" if last else "epoch 0, the only one"
        yield (
            f"trainer.batch_increase_function changes nothing: it returned 0 for {epochs}, so every update is of "
            f"{format_count(first_size, 'row')}"
        )


def _schedule_for(trainer: FinetuneTrainer, rows: TokenRows, seed: int) -> _ScheduleFor:
    final_size = trainer.effective_batch_size
    assert isinstance(final_size, int), "resolved before"

    def at(duration: Duration, total_samples: int) -> int:
        clock = RunClock(lengths=rows.lengths, seed=seed, total_samples=total_samples, final_size=final_size)
        return clock.samples(duration)

    known: dict[Duration, int] = {}  # tokens take a look at each row, and many lengths of the run are tried

    def samples(duration: Duration, total_samples: int) -> int:
        if duration.unit == "dur":
            return at(duration, total_samples)
        if duration not in known:
            known[duration] = at(duration, total_samples)
        return known[duration]

    if trainer.batch_schedule is not None:
        steps = parse_batch_steps(trainer.batch_schedule)
        return lambda total: schedule_of([(samples(start, total), size) for start, size in steps])
    if trainer.batch_rampup is None:
        return lambda total: constant(final_size)
    length = parse_duration(trainer.batch_rampup.length)
    ramp = cache(partial(_ramp, trainer, final_size))  # that of a length in samples is the same in every run
    return lambda total: ramp(samples(length, total))


def _ramp(trainer: FinetuneTrainer, final_size: int, length_samples: int) -> BatchSchedule:
    ramp = trainer.batch_rampup
    assert ramp is not None, "asked of ramps"
    initial = ramp.initial or trainer.initial_effective_batch_size or first_size(final_size)
    if ramp.shape == "linear":
        return linear(initial=initial, final=final_size, length_samples=length_samples, increment=ramp.increment or 1)
    shape = doubling if ramp.shape == "doubling" else equal_steps
    return shape(initial=initial, final=final_size, length_samples=length_samples)


def first_size(final_size: int) -> int:
    """Where a ramp begins that does not say: a quarter of the final batch, whatever the card is."""
    return -(-final_size // 4)


def _adaptation(trainer: FinetuneTrainer) -> Adaptation | None:
    limits = trainer.batch_adaptation
    if limits is None:
        return None
    assert isinstance(trainer.effective_batch_size, int), "resolved before"
    return Adaptation(size=trainer.effective_batch_size, smallest=limits.min, largest=limits.max)
