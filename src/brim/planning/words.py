"""Describe a plan in a few lines, as `brim train` and `brim predict` print it before they begin.

A plan's table and its short form share the words for its figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from brim.errors import Problem
from brim.memory.devices import Budget
from brim.notes import Note, planned, warning
from brim.planning.plan import (
    Candidate,
    ForwardPlan,
    GenerationPlan,
    Host,
    TrainingPlan,
    Unplanned,
    Wire,
    shape_in_words,
)
from brim.units import format_bytes, format_count, format_seconds


def generation_words(plan: GenerationPlan) -> dict[str, str]:
    """Return a plan's figures in words: engine, rows, peak, budget, time, and `would` where the rows were given.

    The time is as if every response took all of its tokens; it is an estimate and not a bound.
    """
    first, budget = plan.shapes[0], plan.budget
    limit = _limit_in_words(budget)
    words = {
        "engine": plan.engine + (f" ({plan.engine_reason})" if plan.engine_reason else ""),
        "rows": f"{format_count(first.rows, 'row')} of up to {format_count(first.columns, 'token')} together "
        f"({plan.rows_reason})",
        "peak": limit if plan.total_bytes is None else f"{format_bytes(plan.total_bytes)} of {limit}",
        "budget": _budget_in_words(budget),
        "time": _generation_time(plan),
    }
    if plan.would_take is not None:
        rows = format_count(plan.would_take, "row")
        words["would"] = f"without a configured number the plan would take {rows} ({plan.would_take_reason})"
    return words


def _generation_lines(plan: GenerationPlan) -> Iterator[str]:
    """Yield a note each on how many rows run together and why, on memory and time, and what else is worth knowing."""
    words = generation_words(plan)
    rows = words["rows"]
    yield planned("batch", f"{rows}; engine {words['engine']}", short=rows)
    known = [format_bytes(each) for each in (plan.total_bytes, plan.budget.limit_bytes) if each is not None]
    yield planned("memory", words["peak"], short=" of ".join(known))
    if plan.num_members > 1:
        share = format_count(plan.prompts.num_rows, "prompt")
        yield planned("runs", f"{plan.num_members} processes; memory, time and up to {share} are of each")
    if plan.seconds is not None:
        yield planned(
            "time", words["time"], short=f"about {format_seconds(plan.seconds)} (estimated) if no response ends early"
        )
    if "would" in words:
        yield words["would"]
    yield from (Note(line, kind="detail") for line in plan.notes)


def scoring_lines(plan: ForwardPlan | Unplanned, *, doing: str, is_part: bool) -> Iterator[str]:
    """Yield a note each on batches, memory and time; of what is a part of another job, one for all."""
    if isinstance(plan, Unplanned):
        yield Note(f"{doing}: {plan}", kind="detail")
        return
    rows, tokens = plan.widest
    batches = f"{format_count(plan.num_batches, 'batch', 'batches')} of up to {rows:,} × {tokens:,} tokens"
    at_most = "at most " if plan.source == "closed form" else ""
    memory = f"{at_most}{format_bytes(plan.total_bytes)} of {format_bytes(plan.budget.limit_bytes)}"
    time = f"about {format_seconds(plan.seconds)} (estimated)"
    if is_part:
        yield Note(f"{doing}: {batches}; {memory}; {time} ({plan.reason})", kind="detail")
        return
    yield planned("batch", f"{batches}, {plan.padding - 1:.1%} padding ({plan.reason})", short=batches)
    yield planned("memory", f"{memory} ({plan.budget.limit_reason})", short=memory)
    yield planned("time", time)


def training_words(plan: TrainingPlan) -> dict[str, str]:
    """Return a plan's figures in words: batch, budget, time, and `schedule` where the batch moves.

    batch: the rows of an update: "32 rows", or "8 to 512 rows" where that moves; seconds: of a run that fits. runs: in
    several processes, what each holds and sends; host: where weights are offloaded, what lies there and is copied.
    """
    seconds = _seconds_in_words(plan)
    time = _steps_in_words(plan)
    if plan.chosen is not None:
        bound = "" if plan.chosen.bound_by is None else f", bound by {plan.chosen.bound_by}"
        time += f", {seconds} without evaluation ({plan.chosen.time_source}{bound})"
    words = {"batch": _batch_in_words(plan), "budget": _budget_in_words(plan.budget), "time": time, "seconds": seconds}
    if plan.chosen is not None and plan.chosen.wire is not None:
        words["runs"] = _processes_in_words(plan, plan.chosen, plan.chosen.wire)
    if plan.chosen is not None and plan.chosen.host is not None:
        words["host"] = _host_in_words(plan.chosen, plan.chosen.host)
    if plan.batch_moves:
        words["schedule"] = _schedule_in_words(plan)
    return words


def short_plan(plan: TrainingPlan | GenerationPlan, *, phase_notes: Collection[str] = ()) -> list[str]:
    """Return what is chosen, its memory and its time, and what is worth knowing, a note each.

    phase_notes: the plan's advice that says that the effective batch moves otherwise than was asked for. What would
    make the strategy faster is a detail: it has been chosen.
    """
    if isinstance(plan, GenerationPlan):
        return list(_generation_lines(plan))
    on_speed = () if plan.chosen is None else plan.chosen.advice
    return [
        *_facts(plan),
        *(problem.what for problem in (too_long(plan) if plan.too_long else ())),
        *(f"would help: {each}" for each in plan.helps),
        *(
            warning(line, topic="plan")
            if line in phase_notes
            else Note(line, kind="detail" if line in on_speed else "note")
            for line in plan.advice
        ),
    ]


def _generation_time(plan: GenerationPlan) -> str:
    if plan.seconds is None:
        return "not known"
    tokens = "token" if plan.max_new_tokens == 1 else "tokens"
    return (
        f"about {format_seconds(plan.seconds)} (estimated) if every response is {plan.max_new_tokens:,} {tokens} long, "
        "plus loading and starting"
    )


def _facts(plan: TrainingPlan) -> Iterator[Note]:
    """Yield batch, memory and time, each with its label."""
    source = " (found earlier; --replan looks again)" if plan.from_cache else ""
    words, chosen = training_words(plan), plan.chosen
    if chosen is None:
        leanest = min(plan.candidates, key=lambda each: each.single_row_bytes)
        yield planned("batch", f"no strategy fits{source}; {leanest.way}: {leanest.reason}")
        yield planned("memory", words["budget"])
        return
    assert chosen.widest is not None, "it fits"
    rows, tokens = chosen.widest
    number = f"{chosen.micro_batches_per_step:.1f}".removesuffix(".0")
    micro_batches = "micro-batch" if number == "1" else "micro-batches"
    widest = f" of up to {shape_in_words(rows, tokens, is_packed=plan.is_packed)}"
    updates = words.get("schedule", f"updates of {words['batch']}")
    a_process = each = ""
    if chosen.wire is None:
        cut = short = f"{updates}, each in {number} {micro_batches}{widest}"
    else:
        dealt = f" in {plan.num_ranks} processes, {chosen.busy_share or 0.0:.0%} busy"
        cut, short = (f"{updates}, {number} {micro_batches}{of}{dealt}" for of in (widest, ""))
        a_process, each = " a process", " each"
    yield planned("batch", f"{cut}, {chosen.padding_in_words} padding{source}", short=short)
    peak = format_bytes(chosen.total_bytes or 0)
    short = f"{peak} of {format_bytes(plan.budget.limit_bytes)}{each}; {chosen.way}"
    yield planned("memory", f"{peak}{a_process} of {_limit_in_words(plan.budget)}; {chosen.way}", short=short)
    if chosen.wire is not None:
        short = f"each process has {_held(chosen)}; {format_seconds(plan.step_seconds)} a step, "
        short += f"alone {format_seconds(plan.step_seconds_alone)}"
        yield planned("runs", words["runs"], short=short)
    if chosen.host is not None:
        copied = f"{_copied(chosen, chosen.host)} by {chosen.host.link}"
        short = f"{format_bytes(chosen.host.num_bytes)} there{a_process}; {copied}"
        yield planned("host", words["host"], short=short)
    yield planned("time", words["time"], short=f"{_steps_in_words(plan)}, {words['seconds']}")


def _held(chosen: Candidate) -> str:
    return "a part of the model" if chosen.way.is_sharded else "the whole model"


def _processes_in_words(plan: TrainingPlan, chosen: Candidate, wire: Wire) -> str:
    seconds = wire.update_s + wire.round_s * (chosen.micro_batches_per_step or 0.0) / wire.num_ranks
    hidden = ", behind the passes as far as they last" if chosen.way.is_sharded else ""
    sent = f"{format_bytes(wire.bytes_per_step(chosen.micro_batches_per_step or 0.0))} a step, "
    sent += f"{format_seconds(seconds)} by {wire.link} at {wire.bytes_per_s / 1e9:.3g} GB/s"
    return (
        f"in {wire.num_ranks} processes, each with {_held(chosen)} ({plan.strategy_reason}); each sends {sent} "
        f"({wire.source}, within a machine){hidden}; a step takes {format_seconds(plan.step_seconds)}, in one process "
        f"{format_seconds(plan.step_seconds_alone)}"
    )


def _own_passes(chosen: Candidate) -> float:
    """Return the micro-batches that one process has in a step, on average."""
    return (chosen.micro_batches_per_step or 0.0) / (1 if chosen.wire is None else chosen.wire.num_ranks)


def _copied(chosen: Candidate, host: Host) -> str:
    return f"{format_bytes(host.update_bytes + round(host.copied_bytes * _own_passes(chosen)))} copied a step"


def _host_in_words(chosen: Candidate, host: Host) -> str:
    seconds = host.update_s + host.copied_s * _own_passes(chosen)
    by_each = f"{format_bytes(host.copied_bytes)} by each micro-batch, " if host.copied_bytes else ""
    copies = "copies of the " if chosen.way.offload == "optimizer" else ""
    return (
        f"{format_bytes(host.num_bytes)} of its memory for {copies}weights, gradients and the optimizer's states of a "
        f"process (memory.offload); {_copied(chosen, host)}, {by_each}{format_seconds(seconds)} by "
        f"{host.link} at {host.bytes_per_s / 1e9:.3g} GB/s ({host.source}); the optimizer steps on the CPU"
    )


def _limit_in_words(budget: Budget) -> str:
    return (
        f"{format_bytes(budget.limit_bytes)} ({budget.limit_reason}; margin {format_bytes(budget.margin_bytes)}: "
        f"{budget.margin_reason})"
    )


def _budget_in_words(budget: Budget) -> str:
    """Return the budget, and the part of it that PyTorch does not get."""
    return (
        f"{format_bytes(budget.limit_bytes)} ({budget.limit_reason}), less "
        f"{format_bytes(budget.outside_bytes)} outside PyTorch and a margin of "
        f"{format_bytes(budget.margin_bytes)} ({budget.margin_reason})"
    )


def _seconds_in_words(plan: TrainingPlan) -> str:
    if plan.seconds_between is None:
        return f"about {format_seconds(plan.seconds or 0.0)}"
    least, most = map(format_seconds, plan.seconds_between)
    return f"about {least} to {most}" if least != most else f"about {least}"


def _batch_in_words(plan: TrainingPlan) -> str:
    most = plan.effective_batch_size
    return f"{plan.smallest_batch_size:,} to {most:,} rows" if plan.batch_moves else format_count(most, "row")


def _schedule_in_words(plan: TrainingPlan) -> str:
    if plan.steps_between is not None:
        return f"{_batch_in_words(plan)}, by the noise measured while training"
    over = f"in {format_count(plan.num_phases, 'phase')} over {format_count(plan.total_samples, 'sample')}"
    if not plan.phases:
        return f"{_batch_in_words(plan)} {over}"
    first, last = plan.phases[0], plan.phases[-1]
    assert last.first_sample is not None, "it does not depend on what is measured"
    rows = f"{first.size:,} → {format_count(last.size, 'row')}"
    return f"{rows} {over}, {last.size:,} from {last.first_sample:,} on"


def _steps_in_words(plan: TrainingPlan) -> str:
    if plan.steps_between is None:
        return format_count(plan.total_steps or 0, "step")
    fewest, most = plan.steps_between
    return f"{fewest:,} to {most:,} steps"


_MOST_ROWS_NAMED = 5


def too_long(plan: TrainingPlan) -> list[Problem]:
    """Return why a run whose rows do not fit does not begin."""
    shown = plan.too_long[:_MOST_ROWS_NAMED]
    if not shown:
        return [Problem(what=f"no training strategy fits: {plan.reason}", fix="; or ".join(plan.helps))]
    more = f"; {len(plan.too_long):,} rows in all" if len(plan.too_long) > len(shown) else ""
    there = format_bytes(plan.budget.limit_bytes - plan.budget.margin_bytes)
    named = ", ".join(f"row {row.key} ({format_count(row.num_tokens, 'token')})" for row in shown)
    longest = format_bytes(max(row.total_bytes for row in plan.too_long))
    what = f"rows do not fit even alone: {named}{more}. The longest needs {longest}"
    return [Problem(what=f"{what}, and {there} may be used ({plan.budget.limit_reason})", fix="; or ".join(plan.helps))]
