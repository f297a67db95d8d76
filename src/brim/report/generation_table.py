"""A plan for generation as tables: how long the prompts are, how many run together, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from brim.planning.generation_plan import GenerationPlan
from brim.report.generation_lines import engine_in_words, time_in_words, would_take_in_words
from brim.report.memory_table import gib
from brim.report.plan_table import histogram_table, labelled, lengths_in_words
from brim.report.plan_words import budget_in_words
from brim.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_LEGEND = "from row: the longest prompts come first; tokens: prompt and response; GiB: allocated by PyTorch"


def generation_table(plan: GenerationPlan, *, title: str) -> RenderableType:
    """The whole plan for the terminal. title: of the model."""
    from rich.console import Group
    from rich.text import Text

    rows = "1 row" if plan.prompts.num_rows == 1 else f"{plan.prompts.num_rows:,} rows"
    return Group(
        Text(f"{title}: generate for {rows}, on {plan.budget.device}", style="bold"),
        Text(),
        *map(Text, lengths_in_words(plan.prompts)),
        Text(),
        histogram_table(plan.prompts),
        Text(),
        _shapes(plan),
        Text(_LEGEND, style="dim"),
        Text(),
        labelled(facts(plan)),
    )


def facts(plan: GenerationPlan) -> Iterator[tuple[str, str]]:
    """What is taken and why, how long it takes, and what is worth knowing: each with its label."""
    yield "memory", budget_in_words(plan.budget)
    if plan.total_bytes is not None:
        verdict = "" if plan.fits else ": it does not fit"
        yield "peak", f"{format_bytes(plan.total_bytes)} in all{verdict}"
    yield "rows", f"{plan.rows:,}: {plan.rows_reason}"
    would = would_take_in_words(plan)
    if would is not None:
        yield "", would
    yield "prompts", f"{plan.prefill_tokens:,} tokens in a pass: {plan.prefill_reason}"
    yield "time", time_in_words(plan)
    yield "engine", engine_in_words(plan)
    for note in plan.notes:
        yield "note", note


def _shapes(plan: GenerationPlan) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("from row", "rows together", "tokens", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for shape in plan.shapes:
        bytes_in_words = "" if plan.costs is None else gib(shape.peak_bytes)
        table.add_row(f"{shape.first_row:,}", f"{shape.rows:,}", f"{shape.columns:,}", bytes_in_words)
    return table
