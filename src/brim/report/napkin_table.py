"""The napkin as a table, and how far it lies from the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from brim.memory.napkin import Line, Napkin
from brim.memory.prediction import MemoryPrediction
from brim.report.categories import LOOKS
from brim.report.memory_table import gib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def napkin_table(napkin: Napkin, prediction: MemoryPrediction) -> RenderableType:
    """Each line worked, what they come to at each moment, and the distance from the trace."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text("on a napkin", style="bold"),
        Text(),
        _lines(napkin.lines),
        Text(),
        _moments(napkin),
        Text(),
        *(Text(line) for line in (*napkin.notes, distance(napkin, prediction))),
    )


def distance(napkin: Napkin, prediction: MemoryPrediction) -> str:
    """How far the napkin's largest moment lies from the traced peak."""
    off = napkin.total_bytes / prediction.allocated_bytes - 1 if prediction.allocated_bytes else 0.0
    return (
        f"the napkin says {gib(napkin.total_bytes)} GiB, when {_named(napkin.peak)}; the trace "
        f"{gib(prediction.allocated_bytes)} GiB allocated: {off:+.1%}"
    )


def _lines(lines: Sequence[Line]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for line in lines:
        table.add_row(Text(line.name, style=LOOKS[line.category].colour), gib(line.num_bytes), line.formula)
    return table


def _moments(napkin: Napkin) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what is there when", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("lines", overflow="fold")
    for moment, total in napkin.moments.items():
        names = ", ".join(_there(napkin, moment))
        table.add_row(_named(moment), gib(total), names, style="bold" if moment == napkin.peak else None)
    return table


def _there(napkin: Napkin, moment: str) -> Iterator[str]:
    return (line.name for line in napkin.lines if moment in line.moments)


def _named(moment: str) -> str:
    return {
        "load": "the weights are loaded",
        "loss": "the loss is computed",
        "backward begins": "the backward pass begins",
        "backward ends": "the backward pass ends",
        "update": "the weights are updated",
        "prefill": "the prompt is read",
        "decode": "the last token is generated",
    }[moment]
