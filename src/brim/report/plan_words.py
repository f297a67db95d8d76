"""The figures of a plan in words that its table and its short form share."""

from __future__ import annotations

from brim.planning.budget import Budget
from brim.planning.plan import TrainingPlan, Way
from brim.units import format_bytes, format_seconds


def way_in_words(way: Way) -> str:
    """What a candidate sets: "no checkpointing, loss in chunks"."""
    return str(way)


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
    steps = _steps_in_words(plan)
    if plan.chosen is None:
        return steps
    bound = "" if plan.chosen.bound_by is None else f", bound by {plan.chosen.bound_by}"
    return f"{steps}, {seconds_in_words(plan)} without evaluation ({plan.chosen.time_source}{bound})"


def seconds_in_words(plan: TrainingPlan) -> str:
    """How long the run takes, of a plan that fits."""
    if plan.seconds_between is None:
        return f"about {format_seconds(plan.seconds or 0.0)}"
    least, most = map(format_seconds, plan.seconds_between)
    return f"about {least} to {most}" if least != most else f"about {least}"


def batch_in_words(plan: TrainingPlan) -> str:
    """How many rows an update has: "32 rows", or "8 to 512 rows" where that moves."""
    most = plan.effective_batch_size
    if plan.batch_moves:
        return f"{plan.smallest_batch_size:,} to {most:,} rows"
    return f"{most:,} {'row' if most == 1 else 'rows'}"


def schedule_in_words(plan: TrainingPlan) -> str:
    """How the batch moves, of a plan in which it does."""
    if plan.steps_between is not None:
        return f"{batch_in_words(plan)}, by the noise that is measured while training"
    sizes = f"{plan.phases[0].size:,} → {plan.phases[-1].size:,} rows" if plan.phases else batch_in_words(plan)
    over = f"{sizes} in {plan.num_phases:,} phases over {plan.total_samples:,} samples"
    if not plan.phases:
        return over
    last = plan.phases[-1]
    assert last.first_sample is not None, "it does not depend on what is measured"
    return f"{over}, {last.size:,} from {last.first_sample:,} on"


def steps_per_epoch(plan: TrainingPlan) -> int:
    """Updates in one pass over the rows, of the most rows that they have; the last one takes what is left."""
    return -(-plan.lengths.num_rows // plan.effective_batch_size)


def _steps_in_words(plan: TrainingPlan) -> str:
    if plan.steps_between is None:
        return f"{plan.total_steps:,} {'step' if plan.total_steps == 1 else 'steps'}"
    fewest, most = plan.steps_between
    return f"{fewest:,} to {most:,} steps"
