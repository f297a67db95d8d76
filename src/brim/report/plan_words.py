"""The figures of a plan in words that its table and its short form share."""

from __future__ import annotations

from brim.planning.budget import Budget
from brim.planning.plan import TrainingPlan, Way
from brim.units import format_bytes, format_seconds


def way_in_words(way: Way) -> str:
    """What a candidate sets: "no checkpointing, loss in chunks"."""
    loss = "loss in chunks" if way.chunked_loss else "whole logits"
    return f"{'checkpointing' if way.gradient_checkpointing else 'no checkpointing'}, {loss}"


def shape_in_words(shape: tuple[int, int]) -> str:
    """Rows and tokens of a micro-batch."""
    return f"{shape[0]:,} × {shape[1]:,} tokens"


def padding_in_words(padding: float) -> str:
    """What padding adds to the real tokens: 1.031 -> "3.1%"."""
    return f"{100 * (padding - 1):.1f}%"


def memory_in_words(plan: TrainingPlan) -> str:
    """The budget, and what of it PyTorch does not get."""
    return budget_in_words(plan.budget)


def budget_in_words(budget: Budget) -> str:
    """What there is, and what of it PyTorch does not get."""
    return (
        f"{format_bytes(budget.limit_bytes)} ({budget.limit_reason}), less "
        f"{format_bytes(budget.outside_bytes)} outside PyTorch and a margin of "
        f"{format_bytes(budget.margin_bytes)} ({budget.margin_reason})"
    )


def duration_in_words(plan: TrainingPlan) -> str:
    """Steps, and how long they will take."""
    steps = f"{plan.total_steps:,} {'step' if plan.total_steps == 1 else 'steps'}"
    if plan.seconds is None or plan.chosen is None:
        return steps
    bound = "" if plan.chosen.bound_by is None else f", bound by {plan.chosen.bound_by}"
    return f"{steps}, about {format_seconds(plan.seconds)} without evaluation ({plan.chosen.time_source}{bound})"


def steps_per_epoch(plan: TrainingPlan) -> int:
    """Updates in one pass over the rows; the last one takes what is left."""
    return -(-plan.lengths.num_rows // plan.effective_batch_size)
