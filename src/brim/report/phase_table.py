"""The phases of a run whose effective batch moves, as a table: how long each is, and what its steps take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from brim.planning.plan import PhasePlan, TrainingPlan
from brim.report.memory_table import gib
from brim.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_COLUMNS = ("phase", "batch", "samples", "tokens", "steps", "cuts", "GiB", "learning rate")
_RATE = _COLUMNS[-1]
_MEASURED_COLUMNS = ("batch", "cuts", "GiB", "a step")
_LEGEND = "batch: rows of an update; tokens: about; learning rate: first and last update"
_MEASURED_LEGEND = "batch: rows of an update. How many updates have it is measured while training"
_UNITS = ("", "k", "M", "G", "T", "P")
_LONG = 10_000_000  # from here on three figures are enough


def phase_table(plan: TrainingPlan) -> Iterator[RenderableType]:
    """The phases for the terminal, beginning with an empty line; nothing where the batch stands still."""
    from rich.text import Text

    if not plan.batch_moves or not plan.phases:
        return
    yield Text()
    yield _measured(plan) if plan.steps_between is not None else _known(plan)
    yield Text(_LEGEND if plan.steps_between is None else _MEASURED_LEGEND, style="dim")
    hidden = plan.num_phases - len(plan.phases)
    if hidden > 0 and plan.steps_between is None:
        yield Text(f"{hidden:,} of {plan.num_phases:,} phases are left out here", style="dim")


def short_count(number: int) -> str:
    """In three figures: 950, 1.25k, 453k, 1.25M."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g}{_UNITS[unit]}"


def _count(number: int) -> str:
    return f"{number:,}" if number < _LONG else short_count(number)


def _known(plan: TrainingPlan) -> Table:
    table = _table(_COLUMNS)
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
    table = _table(_MEASURED_COLUMNS)
    for each in plan.phases:
        table.add_row(
            f"{each.size:,}",
            f"{each.micro_batches_per_step:.1f}",
            gib(each.total_bytes),
            format_seconds(each.seconds_per_step),
        )
    return table


def _table(columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == _RATE else "right", no_wrap=True)
    return table


def _rates(phase: PhasePlan) -> str:
    if phase.learning_rates is None:
        return ""
    first, last = (f"{rate:.2g}" for rate in phase.learning_rates)
    return first if first == last else f"{first} → {last}"
