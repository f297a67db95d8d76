"""A plan as tables: how long the rows are, what each way to run would cost, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from brim.planning.lengths import LengthSummary
from brim.planning.plan import Candidate, LongRow, TrainingPlan
from brim.report.memory_table import gib
from brim.report.phase_table import phase_table
from brim.report.plan_words import (
    batch_in_words,
    duration_in_words,
    memory_in_words,
    padding_in_words,
    schedule_in_words,
    steps_per_epoch,
    way_in_words,
)
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BAR_CHARACTERS = 30
_MOST_ROWS_SHOWN = 10
_CHOSEN = "→"
_LEGEND = "widest: rows × tokens; GiB: needed in all; cuts: micro-batches a step"


def plan_table(plan: TrainingPlan, *, title: str) -> RenderableType:
    """The whole plan for the terminal. title: of the model."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(headline(plan, title=title), style="bold"),
        Text(),
        *map(Text, lengths_in_words(plan.lengths)),
        Text(),
        histogram_table(plan.lengths),
        Text(),
        _candidates(plan),
        Text(_LEGEND, style="dim"),
        *([Text(f"a step, an epoch: updates of {plan.effective_batch_size:,} rows", style="dim")] * plan.batch_moves),
        *phase_table(plan),
        Text(),
        labelled(facts(plan)),
    ]
    if 0 < len(plan.too_long) < plan.lengths.num_rows:
        parts += [Text(), _long_rows(plan.too_long), *map(Text, _hidden(plan.too_long))]
    return Group(*parts)


def headline(plan: TrainingPlan, *, title: str) -> str:
    """Model, batch and device in a line."""
    return f"{title}: train, updates of {batch_in_words(plan)}, on {plan.budget.device}"


def facts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """What is taken and why, how long it takes, and what is worth knowing: each with its label."""
    yield "memory", memory_in_words(plan)
    yield from _too_large(plan.candidates)
    if plan.chosen is None:
        yield "taken", f"none{_longest(plan.candidates)}"
    else:
        yield "taken", way_in_words(plan.chosen.way)
        yield "why", plan.reason
        yield "time", duration_in_words(plan)
    if plan.batch_moves:
        yield "schedule", schedule_in_words(plan)
    for each in plan.helps:
        yield "would help", each
    for advice in plan.advice:
        yield "note", advice
    if plan.from_cache:
        yield "source", "an earlier plan for the same model, data and device; --replan looks again"


def _too_large(candidates: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    """Why ways do not fit; those with one reason come together."""
    ways: dict[str, list[str]] = {}
    for each in candidates:
        if not each.fits:
            ways.setdefault(each.reason, []).append(way_in_words(each.way))
    for reason, names in ways.items():
        every = len(names) == len(candidates) > 1
        yield "too large", f"{'every way' if every else '; '.join(names)}: {reason}"


def labelled(lines: Iterable[tuple[str, str]]) -> Table:
    """Lines beside their labels."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, line in lines:
        table.add_row(label, Text(line))
    return table


def lengths_in_words(lengths: LengthSummary) -> Iterator[str]:
    """Rows and tokens, and how the lengths are spread."""
    rows = "row" if lengths.num_rows == 1 else "rows"
    yield f"{lengths.num_rows:,} {rows}, {lengths.num_tokens:,} tokens"
    yield (
        f"{lengths.shortest:,} to {lengths.longest:,} tokens a row: half up to {lengths.median:,}, "
        f"90% up to {lengths.p90:,}, 99% up to {lengths.p99:,}"
    )


def histogram_table(lengths: LengthSummary) -> Table:
    """Rows by length, with bars."""
    from rich.table import Table
    from rich.text import Text

    most = max(count for _, count in lengths.histogram)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tokens up to", justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for bound, count in lengths.histogram:
        length = round(_BAR_CHARACTERS * count / most)
        bar = "█" * length or ("▏" if count else "")
        table.add_row(f"{bound:,}", f"{count:,}", Text(bar, style="#0072B2"))
    return table


def _candidates(plan: TrainingPlan) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("checkpointing", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    for name in ("widest", "GiB", "padding", "cuts", "a step", "an epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in plan.candidates:
        is_chosen = each == plan.chosen
        table.add_row(
            f"{_CHOSEN if is_chosen else ' '} {'on' if each.way.gradient_checkpointing else 'off'}",
            "chunks" if each.way.chunked_loss else "whole",
            *_figures(plan, each),
            style="bold" if is_chosen else None if each.fits else "dim",
        )
    return table


def _figures(plan: TrainingPlan, candidate: Candidate) -> Iterator[str]:
    """Widest micro-batch, bytes in all, padding, micro-batches and seconds; of what does not fit the longest row's."""
    if not candidate.fits:
        yield f"1 × {plan.lengths.longest:,}"
        yield gib(candidate.single_row_bytes)
        yield from ("", "", "too large")
        return
    rows, tokens = candidate.widest or (0, 0)
    yield f"{rows:,} × {tokens:,}"
    yield gib(candidate.total_bytes or 0)
    yield "" if candidate.padding is None else padding_in_words(candidate.padding)
    yield "" if candidate.micro_batches_per_step is None else f"{candidate.micro_batches_per_step:.1f}"
    seconds = candidate.seconds_per_epoch
    if seconds is not None:
        yield format_seconds(seconds / steps_per_epoch(plan))
        yield format_seconds(seconds)


def _longest(candidates: Sequence[Candidate]) -> str:
    fitting = [each.longest_that_fits for each in candidates if each.longest_that_fits is not None]
    return f": rows of up to {max(fitting):,} tokens fit" if fitting else ": no row is short enough"


def _long_rows(rows: Sequence[LongRow]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("row (from 0)", "tokens", "needed alone"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda each: (-each.num_tokens, each.key))[:_MOST_ROWS_SHOWN]:
        table.add_row(f"{row.key:,}", f"{row.num_tokens:,}", format_bytes(row.total_bytes))
    return table


def _hidden(rows: Sequence[LongRow]) -> Iterator[str]:
    hidden = len(rows) - _MOST_ROWS_SHOWN
    if hidden > 0:
        yield f"and {hidden:,} more {'row' if hidden == 1 else 'rows'} that {'does' if hidden == 1 else 'do'} not fit"
