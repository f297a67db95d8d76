"""Ways to train, side by side: as a table, as squares, and as tables of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.api.memory_compare import Compared, Failed, OnCard
from brim.memory.device import find_device
from brim.memory.events import CATEGORIES
from brim.memory.prediction import MemoryPrediction
from brim.report.categories import LOOKS, Part, total_by_part
from brim.report.memory_squares import Card, Filled
from brim.report.memory_squares_plot import squares_plot
from brim.report.memory_table import gib
from brim.report.page import PageTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CARDS = ("t4", "rtx-4090", "a100-40gb", "a100-80gb")  # drawn across the piles, where the user names no device
_SQUARES_A_LINE = 40


def print_compared(console: Console, found: Sequence[Compared], failed: Sequence[Failed] = (), *, title: str) -> None:
    """A table, what could not be in it and why, then each way as squares."""
    console.print(Text(_headline(found, title=title), style="bold"))
    console.print()
    parts = [part for part in LOOKS if any(total_by_part(each.prediction)[part] for each in found)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB")
    for each in found:
        table.add_column(each.variant.name.replace(" + ", "\n+ "), justify="right", vertical="bottom")
    for part in parts:
        cells = (gib(total_by_part(each.prediction)[part]) for each in found)
        table.add_row(Text(LOOKS[part].label, style=LOOKS[part].colour), *cells)
    table.add_row("needed", *(_needed(each.prediction) for each in found), style="bold")
    table.add_row("fits on", *(smallest(each) for each in found))
    table.add_row("needed there", *(_there(each) for each in found))
    console.print(table)
    console.print()
    for line in (*_remarks(found), *_failures(failed)):
        console.print(Text(line))
    for each in found:
        console.print()
        changes = ", ".join(f"{key}: {value}" for key, value in each.variant.changes.items()) or "as configured"
        console.print(
            Text.assemble((each.variant.name, "bold"), f"  {gib(each.prediction.total_bytes)} GiB  ({changes})")
        )
        console.print(
            Card(
                parts=total_by_part(each.prediction),
                budget_bytes=each.prediction.budget_bytes,
                per_line=_SQUARES_A_LINE,
                legend_parts=parts if each is found[-1] else (),
            )
        )


def smallest(each: Compared) -> str:
    """The least device of the catalogue that is large enough."""
    return "none" if each.smallest is None else each.smallest.name


def _there(each: Compared) -> str:
    card = each.smallest
    return "" if card is None else _needed(card)


def _needed(taken: MemoryPrediction | OnCard) -> str:
    return f"{gib(taken.total_bytes)}{' c' if taken.gradient_checkpointing else ''}"


def _remarks(found: Sequence[Compared]) -> Iterator[str]:
    prediction = found[0].prediction
    yield f"needed: on {prediction.device}; fits on: the smallest card that has room, in the precision that it has"
    taken = [*(each.smallest for each in found), *(each.prediction for each in found)]
    if any(each is not None and each.gradient_checkpointing for each in taken):
        yield "c: with gradient checkpointing, which brim train takes where it does not fit without"


def _failures(failed: Sequence[Failed]) -> Iterator[str]:
    for each in failed:
        for problem in each.problems:
            yield f"{each.variant.name} is not shown: {problem.what}" + (f"; {problem.fix}" if problem.fix else "")


def compared_picture(found: Sequence[Compared], *, title: str) -> Figure:
    """The ways as piles of squares, with devices across: the one that was named, or some common ones."""
    prediction = found[0].prediction
    if prediction.budget_bytes is not None:
        cards = {prediction.device: prediction.budget_bytes}
    else:
        highest = max(each.prediction.total_bytes for each in found)
        common = {name: find_device(name).memory_bytes for name in _CARDS}
        cards = {name: num_bytes for name, num_bytes in common.items() if num_bytes < 1.1 * highest}
    return squares_plot(
        [Filled(name=each.variant.name, parts=total_by_part(each.prediction)) for each in found],
        title=_headline(found, title=title),
        subtitle="what a training step needs on a GPU, at its peak, with what lies outside PyTorch",
        cards=cards,
    )


def compared_tables(found: Sequence[Compared]) -> list[PageTable]:
    """GiB by part and way; what each way changes, and where it fits."""
    parts: list[Part] = [*CATEGORIES, "unused", "outside"]
    by_way = [total_by_part(each.prediction) for each in found]
    shown = [part for part in parts if any(way[part] for way in by_way)]
    return [
        PageTable(
            caption="GiB at the peak",
            heads=("part", *(each.variant.name for each in found)),
            rows=[(LOOKS[part].label, *(gib(way[part]) for way in by_way)) for part in shown]
            + [("needed on the device", *(gib(each.prediction.total_bytes) for each in found))],
            colours=[*(LOOKS[part].colour for part in shown), "transparent"],
        ),
        PageTable(
            caption="What each way changes, and the devices that have room for it",
            heads=("way", "keys", "fits on"),
            rows=[
                (
                    each.variant.name,
                    ", ".join(f"{key}: {value}" for key, value in each.variant.changes.items()),
                    ", ".join(each.fits_on) or "none of the catalogue",
                )
                for each in found
            ],
            num_texts=3,
        ),
    ]


def _headline(found: Sequence[Compared], *, title: str) -> str:
    prediction = found[0].prediction
    rows = "row" if prediction.batch_size == 1 else "rows"
    return f"{title}: ways to train it, {prediction.batch_size:,} {rows} × {prediction.sequence_length:,} tokens"
