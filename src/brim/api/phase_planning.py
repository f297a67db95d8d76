"""The phases of a run in its plan: refused where they cannot be gone through, else with what they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from brim.api.plan_request import PlanRequest
from brim.batching.walk import Stretch, stretches
from brim.batching.widths import rows_that_fit
from brim.config import Choice
from brim.config.batch import EFFECTIVE
from brim.config.moving_batch import ways_given
from brim.config.places import dotted
from brim.config.resolve import with_effective_rows
from brim.errors import ConfigError
from brim.planning.phase_costs import last_step, phase_costs, steps_between
from brim.planning.phases import faults, larger_than_an_epoch
from brim.planning.plan import PhasePlan, TrainingPlan
from brim.train.batch_schedule import length_of
from brim.train.learning_rate import LearningRate
from brim.train.length import RunLength
from brim.train.setup import learning_rate_of


def require_phases(request: PlanRequest) -> None:
    """Raise ConfigError where the run could not take all the sizes that it asks for, or its learning rate no course."""
    length, where = request.length, _key(request)
    learning_rate_of(request.trainer, request.rows, length, seed=request.config.random_seed)
    problems = faults(length.schedule, num_rows=length.num_rows, total_samples=length.total_samples, where=where)
    if length.adaptation is not None and length.adaptation.largest > length.num_rows:
        largest = length.adaptation.largest
        problems.append(larger_than_an_epoch("max", largest, num_rows=length.num_rows, where=where))
    if problems:
        raise ConfigError(*problems)


def phase_notes(request: PlanRequest, *, fits: bool = True) -> Iterator[str]:
    """What is worth knowing of the batch and its phases. fits: whether there is a way that fits the memory."""
    length = request.length
    if request.is_sized_by_memory and fits:
        yield str(largest_choice(request))
    yield from length.notes
    every, taken = len(length.schedule.phases), sum(1 for _ in _stretches(length))
    if taken < every:
        none = f"{every - taken:,} {'takes' if every - taken == 1 else 'take'} no step"
        yield f"{_key(request)}: of {every:,} phases {none}, since a step of the one before reaches beyond"


def with_phases(plan: TrainingPlan, request: PlanRequest) -> TrainingPlan:
    """The plan with what the phases of the run take in the way that is chosen, and so with the seconds of the run."""
    length = request.length
    plan = replace(
        plan,
        total_samples=length.total_samples,
        smallest_batch_size=length.sizes[0],
        num_phases=sum(1 for _ in _stretches(length)),
        steps_between=None if length.adaptation is None else steps_between(length),
    )
    if plan.chosen is None or plan.costs is None:
        return plan
    found = phase_costs(length, request.task, plan.chosen, plan.costs)
    is_known = length.adaptation is None
    return with_learning_rates(
        replace(
            plan,
            phases=found.phases,
            seconds=found.seconds[0] if is_known else None,
            seconds_between=None if is_known else found.seconds,
        ),
        request,
    )


def with_learning_rates(plan: TrainingPlan, request: PlanRequest) -> TrainingPlan:
    """The plan with the learning rates of today: an earlier plan for the same work may have had others."""
    length = request.length
    rate = learning_rate_of(request.trainer, request.rows, length, seed=request.config.random_seed)
    phases = tuple(
        replace(phase, learning_rates=None if phase.first_sample is None else _rates(phase, rate, length.num_rows))
        for phase in plan.phases
    )
    return replace(plan, phases=phases)


def largest_batch(plan: TrainingPlan, request: PlanRequest) -> int:
    """How many of the longest rows fit together, up to all rows; 1 where the plan cannot tell."""
    if plan.chosen is None or plan.costs is None:
        return 1
    longest, most = [request.task.longest], len(request.rows)
    (rows,) = rows_that_fit(plan.costs, longest, cap_bytes=plan.chosen.cap_bytes, most=most).tolist()
    return max(int(rows), 1)


def bounded(request: PlanRequest, bound: int) -> PlanRequest:
    """The request of a run whose batch is of so many rows, or may not be led beyond them by batch_increase_function."""
    if request.is_sized_by_memory:
        request = replace(request, config=with_effective_rows(request.config, bound))
    known = request.length.increases
    length = length_of(request.trainer, request.rows, seed=request.config.random_seed, bound=bound, known=known)
    return replace(request, length=length)


def largest_choice(request: PlanRequest, *, found: str = "") -> Choice:
    """The effective batch of a run that takes as many rows as fit together. found: how a search found it."""
    rows, tokens = request.trainer.effective_batch_size, request.task.longest
    limit = "all rows to train on" if rows == len(request.rows) else f"{rows:,} of the longest rows, {tokens:,} tokens"
    limit = "trainer.max_batch_size" if rows == request.trainer.max_batch_size else limit
    return Choice(
        key=dotted(EFFECTIVE),
        value=rows,
        reason=f"use_maximum_batch_size, the largest that fits: {found or limit}; so the memory decides what is "
        "learned, and another card may learn otherwise",
    )


def _rates(phase: PhasePlan, rate: LearningRate, num_rows: int) -> tuple[float, float]:
    assert phase.first_sample is not None, "it is known"
    assert phase.num_samples is not None, "it is known"
    first = min(phase.size, num_rows - phase.first_sample % num_rows, phase.num_samples)
    before_last, last = last_step(phase, num_rows=num_rows)
    return (
        rate(consumed_samples=phase.first_sample, batch_samples=first, size=phase.size),
        rate(consumed_samples=before_last, batch_samples=last, size=phase.size),
    )


def _stretches(length: RunLength) -> Iterator[Stretch]:
    return stretches(length.schedule, num_rows=length.num_rows, total_samples=length.total_samples)


def _key(request: PlanRequest) -> str:
    return ".".join(map(str, next(iter(ways_given(request.trainer)), ("trainer", "effective_batch_size"))))
