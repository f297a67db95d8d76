"""Show plans as tables: lengths of rows, costs of each strategy, phases of a run, and generation.

For training, the tables show how long the rows are, what each strategy would cost, and which one is taken; for a run
whose effective batch moves, how long each phase is and what its steps cost. For generation, they show how long the
prompts are, how many run together, and what that costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brim.planning import (
    Candidate,
    GenerationPlan,
    LengthSummary,
    LongRow,
    PhasePlan,
    TrainingPlan,
    generation_words,
    training_words,
)
from brim.units import format_bytes, format_count, format_seconds, gib

_GENERATION_LEGEND = "from row: the longest prompts come first; tokens: prompt and response; GiB: allocated by PyTorch"


def plan_table(plan: TrainingPlan | GenerationPlan, *, title: str) -> RenderableType:
    """Return the whole plan for the terminal. title: of the model."""
    if isinstance(plan, GenerationPlan):
        return _generation_table(plan, title=title)
    return _training_table(plan, title=title)


def _generation_table(plan: GenerationPlan, *, title: str) -> RenderableType:
    rows = format_count(plan.prompts.num_rows, "row")
    return Group(
        Text(f"{title}: generate for {rows}, on {plan.budget.device}", style="bold"),
        Text(),
        *_lengths(plan.prompts),
        Text(),
        _shapes(plan),
        Text(_GENERATION_LEGEND, style="dim"),
        Text(),
        labelled(generation_facts(plan)),
    )


def generation_facts(plan: GenerationPlan) -> Iterator[tuple[str, str]]:
    """Yield labelled lines: what is taken and why, how long it takes, and what is worth knowing."""
    words = generation_words(plan)
    yield "memory", words["budget"]
    if plan.total_bytes is not None:
        verdict = "" if plan.fits else ": it does not fit"
        yield "peak", f"{format_bytes(plan.total_bytes)} in all{verdict}"
    yield "rows", f"{plan.rows:,}: {plan.rows_reason}"
    if "would" in words:
        yield "", words["would"]
    yield "prompts", f"{format_count(plan.prefill_tokens, 'token')} in a pass: {plan.prefill_reason}"
    if plan.num_members > 1:
        yield "runs", f"{plan.num_members} processes; all this is of one of them"
    yield "time", words["time"]
    yield "engine", words["engine"]
    for note in plan.notes:
        yield "note", note


def _shapes(plan: GenerationPlan) -> Table:
    table = _table("from row", "rows together", "tokens", "GiB")
    for shape in plan.shapes:
        bytes_in_words = "" if plan.costs is None else gib(shape.peak_bytes)
        table.add_row(f"{shape.first_row:,}", f"{shape.rows:,}", f"{shape.columns:,}", bytes_in_words)
    return table


_BAR_CHARACTERS = 30


_MOST_ROWS_SHOWN = 10


_CHOSEN = "→"


_PLAN_LEGEND = "widest: {}; GiB: needed in all; cuts: micro-batches a step"


def _training_table(plan: TrainingPlan, *, title: str) -> RenderableType:
    heading = f"{title}: train, updates of {training_words(plan)['batch']}, on {plan.devices_in_words()}"
    parts: list[RenderableType] = [
        Text(heading, style="bold"),
        Text(),
        *_lengths(plan.lengths),
        Text(),
        _candidates(plan),
        Text(_PLAN_LEGEND.format("tokens, packed" if plan.is_packed else "rows × tokens"), style="dim"),
        *(
            [Text(f"a step, an epoch: updates of {format_count(plan.effective_batch_size, 'row')}", style="dim")]
            * plan.batch_moves
        ),
        *phase_table(plan),
        Text(),
        labelled(plan_facts(plan)),
    ]
    if 0 < len(plan.too_long) < plan.lengths.num_rows:
        parts += [Text(), *_long_rows(plan.too_long)]
    return Group(*parts)


def plan_facts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield labelled lines: what is taken and why, how long it takes, and what is worth knowing."""
    words = training_words(plan)
    yield "memory", words["budget"]
    yield from _too_large(plan.candidates)
    if plan.chosen is None:
        yield "taken", f"none{_longest(plan.candidates)}"
    else:
        yield "taken", str(plan.chosen.way)
        yield "why", plan.reason
        if "runs" in words:
            yield "runs", words["runs"]
            yield "busy", f"{plan.chosen.busy_share or 0.0:.0%} of the passes' time, by how micro-batches are dealt"
        if "host" in words:
            yield "host", words["host"]
        yield "time", words["time"]
    if "schedule" in words:
        yield "schedule", words["schedule"]
    yield from (("would help", each) for each in plan.helps)
    yield from (("note", each) for each in plan.advice)
    if plan.from_cache:
        yield "source", "an earlier plan for the same model, data and device; --replan looks again"


def _too_large(candidates: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    """Say why strategies do not fit; those with the same reason share a line."""
    by_reason: dict[str, list[str]] = {}
    for each in candidates:
        if not each.fits:
            by_reason.setdefault(each.reason, []).append(str(each.way))
    for reason, names in by_reason.items():
        every = len(names) == len(candidates) > 1
        yield "too large", f"{'every way' if every else '; '.join(names)}: {reason}"


def labelled(lines: Iterable[tuple[str, str]]) -> Table:
    """Set lines beside their labels."""
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, line in lines:
        table.add_row(label, Text(line))
    return table


def _lengths(lengths: LengthSummary) -> Iterator[RenderableType]:
    """Say how many rows and tokens there are, and how the lengths are spread; then show it with bars."""
    yield Text(f"{format_count(lengths.num_rows, 'row')}, {format_count(lengths.num_tokens, 'token')}")
    yield Text(
        f"{lengths.shortest:,} to {format_count(lengths.longest, 'token')} a row: half up to {lengths.median:,}, "
        f"90% up to {lengths.p90:,}, 99% up to {lengths.p99:,}"
    )
    yield Text()
    most = max(count for _, count in lengths.histogram)
    table = _table("tokens up to", "rows", "", left=[""])
    for bound, count in lengths.histogram:
        bar = "█" * round(_BAR_CHARACTERS * count / most) or ("▏" if count else "")
        table.add_row(f"{bound:,}", f"{count:,}", Text(bar, style="#0072B2"))
    yield table


def _candidates(plan: TrainingPlan) -> Table:
    names = ("checkpointing", "loss", "widest", "GiB", "padding", "cuts", "a step", "an epoch")
    table = _table(*names, left=names[:2])
    for each in plan.candidates:
        is_chosen = each == plan.chosen
        checkpointing = "on" if each.way.gradient_checkpointing else "off"
        if each.way.recomputes_some:
            checkpointing = f"{each.way.gradient_checkpointing} layers"
        held = ", sharded" if each.way.is_sharded else ""
        if each.way.offload != "none":
            held = ", on the host" if each.way.is_sharded else ", optimizer on the host"
        table.add_row(
            f"{_CHOSEN if is_chosen else ' '} {checkpointing}{held}",
            "chunks" if each.way.chunked_loss else "whole",
            *_figures(plan, each),
            style="bold" if is_chosen else None if each.fits else "dim",
        )
    return table


def _figures(plan: TrainingPlan, candidate: Candidate) -> Iterator[str]:
    """Yield widest micro-batch, total bytes, padding, micro-batches and seconds; if too large, the longest row's."""
    if not candidate.fits:
        yield f"1 × {plan.lengths.longest:,}"
        yield gib(candidate.single_row_bytes)
        yield from ("", "", "too large")
        return
    rows, tokens = candidate.widest or (0, 0)
    yield f"{rows * tokens:,}" if plan.is_packed else f"{rows:,} × {tokens:,}"
    yield gib(candidate.total_bytes or 0)
    yield candidate.padding_in_words
    yield "" if candidate.micro_batches_per_step is None else f"{candidate.micro_batches_per_step:.1f}"
    seconds = candidate.seconds_per_epoch
    if seconds is not None:
        yield format_seconds(seconds / plan.steps_per_epoch)
        yield format_seconds(seconds)


def _longest(candidates: Sequence[Candidate]) -> str:
    fitting = [each.longest_that_fits for each in candidates if each.longest_that_fits is not None]
    return f": rows of up to {format_count(max(fitting), 'token')} fit" if fitting else ": no row is short enough"


def _long_rows(rows: Sequence[LongRow]) -> Iterator[RenderableType]:
    table = _table("row (from 0)", "tokens", "needed alone")
    for row in sorted(rows, key=lambda each: (-each.num_tokens, each.key))[:_MOST_ROWS_SHOWN]:
        table.add_row(f"{row.key:,}", f"{row.num_tokens:,}", format_bytes(row.total_bytes))
    yield table
    hidden = len(rows) - _MOST_ROWS_SHOWN
    if hidden > 0:
        yield Text(f"and {format_count(hidden, 'more row')} that {'does' if hidden == 1 else 'do'} not fit")


_PHASE_LEGEND = "batch: rows of an update; tokens: about; learning rate: first and last update"


_MEASURED_LEGEND = "batch: rows of an update. How many updates have it is measured while training"


_UNITS = ("", "k", "M", "G", "T", "P")


_LONG = 10_000_000  # from here on, three figures are enough


def phase_table(plan: TrainingPlan) -> Iterator[RenderableType]:
    """Yield the phases for the terminal, after an empty line; nothing if the effective batch is constant."""
    if not plan.batch_moves or not plan.phases:
        return
    yield Text()
    yield _measured(plan) if plan.steps_between is not None else _known(plan)
    yield Text(_PHASE_LEGEND if plan.steps_between is None else _MEASURED_LEGEND, style="dim")
    hidden = plan.num_phases - len(plan.phases)
    if hidden > 0 and plan.steps_between is None:
        yield Text(f"{hidden:,} of {format_count(plan.num_phases, 'phase')} are left out here", style="dim")


def short_count(number: int) -> str:
    """Write a count in three figures: 950, 1.25k, 453k, 1.25M."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g}{_UNITS[unit]}"


def _count(number: int) -> str:
    return f"{number:,}" if number < _LONG else short_count(number)


def _known(plan: TrainingPlan) -> Table:
    rate = "learning rate"
    table = _table("phase", "batch", "samples", "tokens", "steps", "cuts", "GiB", rate, left=[rate])
    for each in plan.phases:
        table.add_row(
            f"{each.number:,}",
            f"{each.size:,}",
            _count(each.num_samples or 0),
            short_count(each.num_tokens or 0),
            _count(each.num_steps or 0),
            f"{each.micro_batches_per_step:.1f}",
            gib(each.total_bytes),
            _rates(each),
        )
    return table


def _measured(plan: TrainingPlan) -> Table:
    table = _table("batch", "cuts", "GiB", "a step")
    for each in plan.phases:
        table.add_row(
            f"{each.size:,}",
            f"{each.micro_batches_per_step:.1f}",
            gib(each.total_bytes),
            format_seconds(each.seconds_per_step),
        )
    return table


def _table(*names: str, left: Collection[str] = ()) -> Table:
    """Return an empty table of figures. left: the columns that are aligned at the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _rates(phase: PhasePlan) -> str:
    if phase.learning_rates is None:
        return ""
    first, last = (f"{rate:.2g}" for rate in phase.learning_rates)
    return first if first == last else f"{first} → {last}"
