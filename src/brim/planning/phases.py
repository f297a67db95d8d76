"""Find what the phases of a training run take, or why it cannot go through them.

What a phase takes is that of steps of each size, made of rows as the phase meets them and partitioned as the run
partitions them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from brim.batching import BatchSchedule, Costs, Stretch
from brim.errors import Problem
from brim.planning.candidates import Task
from brim.planning.plan import Candidate, PhasePlan
from brim.train import RunLength
from brim.units import format_count


def stretches_of(length: RunLength) -> list[Stretch]:
    """Return the stretches of steps of one size that a run makes."""
    return list(length.schedule.stretches(num_rows=length.num_rows, total_samples=length.total_samples))


def faults(schedule: BatchSchedule, *, num_rows: int, total_samples: int, where: str = "") -> list[Problem]:
    """Return why a run cannot go through all of its phases; nothing where it can.

    num_rows: of an epoch, whose end no step crosses. where: the key that asks for the phases.
    A constant size is never at fault: a batch that is larger than the data is all of it.
    """
    if schedule.is_constant:
        return []
    return [*_too_large(schedule, num_rows, where), *_never_begun(schedule, total_samples, where)]


def larger_than_an_epoch(who: str, size: int, *, num_rows: int, where: str) -> Problem:
    """Return the problem of a size that no step could have. who: asks for it."""
    return Problem(
        what=f"{who} asks for {size:,} rows a step, and there are {num_rows:,} to train on: a step ends with its "
        "epoch, so none would be that large",
        where=where,
        expected=f"at most {num_rows:,} rows a step",
        fix=f"lower it to {num_rows:,} or less, or train on more rows",
    )


def _too_large(schedule: BatchSchedule, num_rows: int, where: str) -> Iterator[Problem]:
    number, largest = max(enumerate(schedule.phases, start=1), key=lambda each: each[1].size)
    if largest.size > num_rows:
        who = f"phase {number:,} of {len(schedule.phases):,}"
        yield larger_than_an_epoch(who, largest.size, num_rows=num_rows, where=where)


def _never_begun(schedule: BatchSchedule, total_samples: int, where: str) -> Iterator[Problem]:
    late = [number for number, phase in enumerate(schedule.phases, start=1) if phase.first_sample >= total_samples]
    if late:
        phase, after = schedule.phases[late[0] - 1], len(late) - 1
        more = f", nor are the {after:,} after it" if after > 1 else ", nor is the one after it" if after else ""
        yield Problem(
            what=f"phase {late[0]:,} of {len(schedule.phases):,}, {format_count(phase.size, 'row')} a step after "
            f"{phase.first_sample:,} samples, is never reached, since the run ends after {total_samples:,}{more}",
            where=where,
            expected="phases that begin before the run ends",
            fix="change the batch earlier, or train longer: trainer.epochs, train_steps or train_samples"
            + (f"; for a short trial, leave it out: {where}=null" if where else ""),
        )


_MOST_PHASES = 16


_MOST_ROWS = 1 << 13  # of a phase that are partitioned, or one step: some tenths of a second for 16 phases


_T = TypeVar("_T")


Phases: TypeAlias = tuple[PhasePlan, ...]  # those looked at


Bounds: TypeAlias = tuple[float, float]  # the least and most seconds of a run, which differ where the batch adapts


_Step: TypeAlias = tuple[PhasePlan, float]  # of a size, whenever it is taken; seconds of a row's passes, on average


def phase_costs(length: RunLength, task: Task, chosen: Candidate, costs: Costs) -> tuple[Phases, Bounds]:
    """Return what the phases of a run take in the chosen strategy. costs: of that strategy.

    Of more than 16 phases as many are looked at, evenly chosen; the time of a row in the others is interpolated between
    the next smaller and the next larger size.
    """
    if length.adaptation is not None:
        return _adapting(length, task, chosen, costs)
    every = stretches_of(length)
    if length.schedule.is_constant:
        steps = {length.schedule.final_size: _as_chosen(length, chosen)}
    else:
        # From the sample on with which the run first takes a size.
        first_samples = {each.size: each.first_sample for each in reversed(looked_at(every))}
        steps = {size: _step(task, chosen, costs, size, first) for size, first in sorted(first_samples.items())}
    phases = tuple(
        replace(
            steps[each.size][0],
            number=number,
            first_sample=each.first_sample,
            num_samples=each.num_samples,
            num_tokens=_tokens(task, each.end_sample) - _tokens(task, each.first_sample),
            num_steps=each.num_steps,
        )
        for number, each in looked_at(list(enumerate(every, start=1)))
    )
    seconds = _seconds(every, steps, chosen.update_s)
    return phases, (seconds, seconds)


def steps_between(length: RunLength) -> tuple[int, int]:
    """Return the fewest and the most steps of a run whose batch follows what is measured."""
    return _num_steps(length, length.sizes[-1]), _num_steps(length, length.sizes[0])


def _num_steps(length: RunLength, size: int) -> int:
    return BatchSchedule.constant(size).num_steps(num_rows=length.num_rows, total_samples=length.total_samples)


def last_step(size: int, first_sample: int, num_samples: int, *, num_rows: int) -> tuple[int, int]:
    """Return what is consumed before the last step of a phase, and the step's rows. num_rows: of an epoch."""
    end = first_sample + num_samples
    start = max(first_sample, (end - 1) // num_rows * num_rows)  # of its part of the last epoch
    consumed = start + (end - start - 1) // size * size
    return consumed, end - consumed


def looked_at(every: Sequence[_T]) -> Sequence[_T]:
    """Return all, or 16 evenly chosen ones, with the first and the last."""
    if len(every) <= _MOST_PHASES:
        return every
    return [every[round(number * (len(every) - 1) / (_MOST_PHASES - 1))] for number in range(_MOST_PHASES)]


def _adapting(length: RunLength, task: Task, chosen: Candidate, costs: Costs) -> tuple[Phases, Bounds]:
    steps = {size: _step(task, chosen, costs, size, 0) for size in looked_at(length.sizes)}
    runs = [
        row_s * length.total_samples + chosen.update_s * _num_steps(length, size) for size, (_, row_s) in steps.items()
    ]
    return tuple(phase for phase, _ in steps.values()), (min(runs), max(runs))


def _as_chosen(length: RunLength, chosen: Candidate) -> _Step:
    """Return the one phase of a constant size, for which the candidate has partitioned an epoch."""
    assert chosen.seconds_per_epoch is not None, "it fits"
    assert chosen.micro_batches_per_step is not None, "it fits"
    assert chosen.total_bytes is not None, "it fits"
    size = length.schedule.final_size
    steps_per_epoch = -(-length.num_rows // size)
    phase = PhasePlan(
        size=size,
        micro_batches_per_step=chosen.micro_batches_per_step,
        total_bytes=chosen.total_bytes,
        seconds_per_step=chosen.seconds_per_epoch / steps_per_epoch,
    )
    return phase, (chosen.seconds_per_epoch - chosen.update_s * steps_per_epoch) / length.num_rows


def _step(task: Task, chosen: Candidate, costs: Costs, size: int, first_sample: int) -> _Step:
    """Partition whole steps of rows in the order of the first epoch, each row once; other epochs are alike."""
    assert chosen.widest is not None, "it fits"
    assert chosen.total_bytes is not None, "it fits"
    num_rows = len(task.lengths)
    rows_per_step = min(size, num_rows)
    num_cut = min(max(_MOST_ROWS // rows_per_step, 1), num_rows // rows_per_step) * rows_per_step
    rows = (first_sample + np.arange(num_cut)) % num_rows
    window = replace(task, lengths=task.lengths[rows], effective_batch_size=rows_per_step)
    totals, _ = window.dealt(
        window.epoch(costs, cap_bytes=chosen.cap_bytes), costs, chosen.wire, cap_bytes=chosen.cap_bytes
    )
    more_bytes = totals.widest.peak_bytes - int(np.ceil(costs.peak_bytes(*chosen.widest)))
    row_s = totals.seconds / num_cut
    plan = PhasePlan(
        size=size,
        micro_batches_per_step=totals.num_micro_batches / totals.num_steps,
        total_bytes=max(chosen.total_bytes + more_bytes, chosen.single_row_bytes),
        seconds_per_step=rows_per_step * row_s + chosen.update_s,
    )
    return plan, row_s


def _tokens(task: Task, samples: int) -> int:
    """Return the tokens of the first so many samples, by the mean length."""
    return samples * int(task.lengths.sum()) // len(task.lengths)


def _seconds(every: Sequence[Stretch], steps: Mapping[int, _Step], update_s: float) -> float:
    known = sorted(steps)
    row_s = np.interp([each.size for each in every], known, [steps[size][1] for size in known])
    passes_s = float(np.dot(row_s, [each.num_samples for each in every]))
    return passes_s + update_s * sum(each.num_steps for each in every)
