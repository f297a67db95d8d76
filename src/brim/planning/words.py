"""Say a plan in a few lines, as `brim train` and `brim predict` print it before they begin.

The words for a plan's figures are shared by its table and its short form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from brim.memory import Budget
from brim.notes import Note, planned, warning
from brim.planning.plan import GenerationPlan, TrainingPlan, Way
from brim.units import format_bytes, format_count, format_seconds


def generation_lines(plan: GenerationPlan) -> list[str]:
    """How many rows run together and why, memory and time, a note each; and what is worth knowing."""
    would = would_take_in_words(plan)
    rows = rows_in_words(plan)
    lines: list[str] = [
        planned("batch", f"{rows}; engine {engine_in_words(plan)}", short=rows),
        planned(
            "memory",
            generation_memory_in_words(plan),
            short=" of ".join(
                format_bytes(each) for each in (plan.total_bytes, plan.budget.limit_bytes) if each is not None
            ),
        ),
    ]
    if plan.seconds is not None:
        short = f"at most about {format_seconds(plan.seconds)} (estimated)"
        lines.append(planned("time", time_in_words(plan), short=short))
    return [*lines, *filter(None, [would]), *plan.notes]


def rows_in_words(plan: GenerationPlan) -> str:
    """How many of the longest prompts run together, and why so many."""
    first = plan.shapes[0]
    rows = format_count(first.rows, "row")
    return f"{rows} of up to {format_count(first.columns, 'token')} together ({plan.rows_reason})"


def generation_memory_in_words(plan: GenerationPlan) -> str:
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
    rows = format_count(plan.would_take, "row")
    return f"by itself the plan would take {rows} ({plan.would_take_reason})"


def short_plan(plan: TrainingPlan, *, phase_notes: Collection[str] = ()) -> list[str]:
    """Return the way that is taken, its memory and its time, and what is worth knowing, a note each.

    phase_notes: what of the plan's advice says that the effective batch moves otherwise than was asked for. What would
    make the way faster is a detail: the way has been chosen.
    """
    on_speed = () if plan.chosen is None else plan.chosen.advice
    return [
        *_facts(plan),
        *(
            warning(line, topic="plan")
            if line in phase_notes
            else Note(line, kind="detail" if line in on_speed else "note")
            for line in plan.advice
        ),
    ]


def _facts(plan: TrainingPlan) -> Iterator[Note]:
    """Batch, memory and time, each with its label."""
    source = " (found earlier; --replan looks again)" if plan.from_cache else ""
    chosen = plan.chosen
    if chosen is None:
        leanest = min(plan.candidates, key=lambda each: each.single_row_bytes)
        yield planned("batch", f"no way fits{source}; {way_in_words(leanest.way)}: {leanest.reason}")
        yield planned("memory", memory_in_words(plan))
        return
    assert chosen.widest is not None, "it fits"
    assert chosen.micro_batches_per_step is not None, "it fits"
    assert chosen.padding is not None, "it fits"
    assert chosen.total_bytes is not None, "it fits"
    cut = f"{_number(chosen.micro_batches_per_step)} of up to {shape_in_words(chosen.widest)}"
    padding = f", {padding_in_words(chosen.padding)} padding"
    rows = schedule_in_words(plan) if plan.batch_moves else f"updates of {batch_in_words(plan)}"
    yield planned("batch", f"{rows}, each in {cut}{padding}{source}", short=f"{rows}, each in {cut}")
    budget, way = plan.budget, way_in_words(chosen.way)
    taken = f"{format_bytes(chosen.total_bytes)} of {format_bytes(budget.limit_bytes)}"
    why = f"({budget.limit_reason}; margin {format_bytes(budget.margin_bytes)}: {budget.margin_reason})"
    yield planned("memory", f"{taken} {why}; {way}", short=f"{taken}; {way}")
    yield planned("time", duration_in_words(plan), short=f"{_steps_in_words(plan)}, {seconds_in_words(plan)}")


def _number(micro_batches: float) -> str:
    shown = f"{micro_batches:.1f}".removesuffix(".0")
    return f"{shown} {'micro-batch' if shown == '1' else 'micro-batches'}"


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
    return format_count(most, "row")


def schedule_in_words(plan: TrainingPlan) -> str:
    """How the batch moves, of a plan in which it does."""
    if plan.steps_between is not None:
        return f"{batch_in_words(plan)}, by the noise that is measured while training"
    sizes = (
        f"{plan.phases[0].size:,} → {format_count(plan.phases[-1].size, 'row')}"
        if plan.phases
        else batch_in_words(plan)
    )
    over = f"{sizes} in {format_count(plan.num_phases, 'phase')} over {format_count(plan.total_samples, 'sample')}"
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
        return format_count(plan.total_steps or 0, "step")
    fewest, most = plan.steps_between
    return f"{fewest:,} to {most:,} steps"
