"""A plan for generation in a few lines, as `brim predict` prints it before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from brim.planning.generation_plan import GenerationPlan
from brim.units import format_bytes, format_seconds


def generation_lines(plan: GenerationPlan) -> list[str]:
    """At most five: how many rows run together and why, memory, time, and what is worth knowing."""
    return list(_lines(plan))


def rows_in_words(plan: GenerationPlan) -> str:
    """How many of the longest prompts run together, and why so many."""
    first = plan.shapes[0]
    rows = "1 row" if first.rows == 1 else f"{first.rows:,} rows"
    return f"{rows} of up to {first.columns:,} tokens together ({plan.rows_reason})"


def memory_in_words(plan: GenerationPlan) -> str:
    """The predicted peak beside the limit; of what cannot be traced, the limit alone."""
    budget = plan.budget
    limit = f"{format_bytes(budget.limit_bytes)} ({budget.limit_reason}; margin {format_bytes(budget.margin_bytes)}: "
    limit += f"{budget.margin_reason})"
    return limit if plan.total_bytes is None else f"{format_bytes(plan.total_bytes)} of {limit}"


def time_in_words(plan: GenerationPlan) -> str:
    """Return the estimate as if every response took all of its tokens; it is no bound, and does not say so."""
    if plan.seconds is None:
        return "not known"
    tokens = "token" if plan.max_new_tokens == 1 else "tokens"
    return (
        f"about {format_seconds(plan.seconds)} (estimated), were every response {plan.max_new_tokens:,} {tokens} long, "
        "and what loading and starting take"
    )


def engine_in_words(plan: GenerationPlan) -> str:
    """Its name, and why it is this one."""
    return plan.engine + (f" ({plan.engine_reason})" if plan.engine_reason else "")


def would_take_in_words(plan: GenerationPlan) -> str | None:
    """What the plan would have taken, where somebody gave a number."""
    if plan.would_take is None:
        return None
    rows = "1 row" if plan.would_take == 1 else f"{plan.would_take:,} rows"
    return f"by itself the plan would take {rows} ({plan.would_take_reason})"


def _lines(plan: GenerationPlan) -> Iterator[str]:
    yield f"plan: engine {engine_in_words(plan)}; {rows_in_words(plan)}"
    would = would_take_in_words(plan)
    if would is not None:
        yield f"plan: {would}"
    yield f"memory: {memory_in_words(plan)}"
    if plan.seconds is not None:
        yield f"time: {time_in_words(plan)}"
    if plan.notes:
        yield f"note: {'; '.join(plan.notes)}"
