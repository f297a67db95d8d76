"""A plan in a few lines, as `brim train` prints it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from brim.notes import Note, warning
from brim.planning.plan import Candidate, TrainingPlan
from brim.report.plan_words import (
    duration_in_words,
    memory_in_words,
    padding_in_words,
    schedule_in_words,
    shape_in_words,
    way_in_words,
)
from brim.units import format_bytes


def short_plan(plan: TrainingPlan, *, phase_notes: Collection[str] = ()) -> list[str]:
    """Return the way that is taken, its memory and its time, and what is worth knowing, a note each.

    phase_notes: what of the plan's advice says that the effective batch moves otherwise than was asked for. What would
    make the way faster is a detail: the way has been chosen.
    """
    on_speed = () if plan.chosen is None else plan.chosen.advice
    return [
        *(Note(line, kind="plan", topic=topic) for topic, line in _lines(plan)),
        *(
            warning(line, topic="plan")
            if line in phase_notes
            else Note(line, kind="detail" if line in on_speed else "note")
            for line in plan.advice
        ),
    ]


def _lines(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """With what each is about."""
    source = " (found earlier; --replan looks again)" if plan.from_cache else ""
    if plan.chosen is None:
        leanest = min(plan.candidates, key=lambda each: each.single_row_bytes)
        yield "plan", f"plan: no way fits{source}; {way_in_words(leanest.way)}: {leanest.reason}"
        yield "memory", f"memory: {memory_in_words(plan)}"
        return
    yield "plan", f"plan: {_cut(plan.chosen)}{source}"
    yield "memory", f"memory: {_memory(plan, plan.chosen)}"
    if plan.batch_moves:
        yield "plan", f"schedule: {schedule_in_words(plan)}"
    yield "time", f"time: {duration_in_words(plan)}"


def _cut(chosen: Candidate) -> str:
    assert chosen.widest is not None, "it fits"
    assert chosen.micro_batches_per_step is not None, "it fits"
    assert chosen.padding is not None, "it fits"
    return (
        f"{way_in_words(chosen.way)}; {_number(chosen.micro_batches_per_step)} a step, of up to "
        f"{shape_in_words(chosen.widest)}, {padding_in_words(chosen.padding)} padding"
    )


def _number(micro_batches: float) -> str:
    shown = f"{micro_batches:.1f}".removesuffix(".0")
    return f"{shown} {'micro-batch' if shown == '1' else 'micro-batches'}"


def _memory(plan: TrainingPlan, chosen: Candidate) -> str:
    assert chosen.total_bytes is not None, "it fits"
    budget = plan.budget
    return (
        f"{format_bytes(chosen.total_bytes)} of {format_bytes(budget.limit_bytes)} ({budget.limit_reason}; "
        f"margin {format_bytes(budget.margin_bytes)}: {budget.margin_reason})"
    )
