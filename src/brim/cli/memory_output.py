"""Print training variants side by side, and measurements beside predictions, for `brim memory`.

Each comes as a table in the terminal, as a picture, and as tables of an HTML page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.memory import Compared, Failed, MemoryPrediction, OnCard
from brim.memory.devices import find_device
from brim.report import LOOKS, Card, PageTable, memory_plot, prediction_tables, total_by_part, variants_plot
from brim.units import format_count, gib
from brim.workflows.measure import Beside, PhasePeak

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CARDS = ("t4", "rtx-4090", "a100-40gb", "a100-80gb")  # drawn across the bars if the user names no device


def print_compared(
    console: Console, found: Sequence[Compared], failed: Sequence[Failed] = (), *, title: str, with_squares: bool
) -> None:
    """Print a table of the variants, why some are missing from it, then, where asked, each variant as squares."""
    console.print(Text(_headline(found, title=title), style="bold"))
    console.print()
    parts = [part for part in LOOKS if any(total_by_part(each.prediction)[part] for each in found)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB")
    for each in found:
        table.add_column(each.variant.name.replace(" + ", "\n+ "), justify="right", vertical="bottom")
    for part in parts:
        cells = (gib(total_by_part(each.prediction)[part]) for each in found)
        table.add_row(LOOKS[part].label, *cells)
    table.add_row("needed", *(_needed(each.prediction) for each in found), style="bold")
    cards = [each.smallest for each in found]
    table.add_row("fits on", *("none" if card is None else card.name for card in cards))
    table.add_row("needed there", *("" if card is None else _needed(card) for card in cards))
    console.print(table)
    console.print()
    for line in (*_remarks(found), *_failures(failed)):
        console.print(Text(line))
    for each in found if with_squares else ():
        console.print()
        changes = ", ".join(f"{key}: {value}" for key, value in each.variant.changes.items()) or "as configured"
        console.print(
            Text.assemble((each.variant.name, "bold"), f"  {gib(each.prediction.total_bytes)} GiB  ({changes})")
        )
        console.print(
            Card(
                parts=total_by_part(each.prediction),
                budget_bytes=each.prediction.budget_bytes,
                legend_parts=parts if each is found[-1] else (),
            )
        )


def _needed(taken: MemoryPrediction | OnCard) -> str:
    return f"{gib(taken.total_bytes)}{' c' if taken.gradient_checkpointing else ''}"


def _remarks(found: Sequence[Compared]) -> Iterator[str]:
    prediction = found[0].prediction
    yield f"needed: on {prediction.device}; fits on: the smallest card with enough memory, in that card's precision"
    taken = [*(each.smallest for each in found), *(each.prediction for each in found)]
    if any(each is not None and each.gradient_checkpointing for each in taken):
        yield "c: with gradient checkpointing, which brim train uses where the run does not fit without it"


def _failures(failed: Sequence[Failed]) -> Iterator[str]:
    for each in failed:
        for problem in each.problems:
            yield f"{each.variant.name} is not shown: {problem.what}" + (f"; {problem.fix}" if problem.fix else "")


def compared_picture(found: Sequence[Compared], *, title: str) -> Figure:
    """Draw the variants as bars, with devices as lines: the one that was named, or some common ones."""
    prediction = found[0].prediction
    if prediction.budget_bytes is not None:
        cards = {prediction.device: prediction.budget_bytes}
    else:
        highest = max(each.prediction.total_bytes for each in found)
        common = {name: find_device(name).memory_bytes for name in _CARDS}
        cards = {name: num_bytes for name, num_bytes in common.items() if num_bytes < 1.1 * highest}
    return variants_plot(
        {each.variant.name: total_by_part(each.prediction) for each in found},
        title=_headline(found, title=title),
        subtitle="what a training step needs on a GPU, at its peak, with what lies outside PyTorch",
        cards=cards,
    )


def compared_tables(found: Sequence[Compared]) -> list[PageTable]:
    """Return tables of GiB by part and variant, and of what each variant changes and where it fits."""
    by_variant = [total_by_part(each.prediction) for each in found]
    shown = [part for part in by_variant[0] if any(each[part] for each in by_variant)]
    return [
        PageTable(
            caption="GiB at the peak",
            heads=("part", *(each.variant.name for each in found)),
            rows=[(LOOKS[part].label, *(gib(each[part]) for each in by_variant)) for part in shown]
            + [("needed on the device", *(gib(each.prediction.total_bytes) for each in found))],
            colours=[*(LOOKS[part].colour for part in shown), "transparent"],
        ),
        PageTable(
            caption="What each way changes, and the devices that it fits on",
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
    rows = format_count(prediction.batch_size, "row")
    return f"{title}: ways to train it, {rows} × {prediction.sequence_length:,} tokens"


def print_measured(console: Console, beside: Beside, *, title: str) -> None:
    """Print each phase predicted and measured, and a leak."""
    measured = beside.measured
    shape = f"{title}: {beside.main.batch_in_words()}"
    console.print(Text(f"{shape}: predicted, and measured on {measured.device}", style="bold"))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("predicted GiB", "measured GiB", "difference"):
        table.add_column(name, justify="right")
    for row in _rows(beside):
        table.add_row(*row)
    console.print(table)
    for line in _about(beside):
        console.print(Text(line))


def measured_picture(beside: Beside, *, title: str) -> Figure:
    """Draw the predicted timeline, with the measured peak of its phase as a line."""
    peaks = [beside.measured_bytes(peak) for peak in beside.measured.peaks if peak.phase == beside.main.phase]
    return memory_plot(beside.main, title=title, measured_bytes=max(peaks))


def measured_tables(beside: Beside) -> list[PageTable]:
    """Return tables of predicted and measured bytes, and the notes."""
    return [
        PageTable(
            caption="Predicted and measured, GiB",
            heads=("phase", "predicted", "measured", "difference"),
            rows=list(_rows(beside)),
        ),
        PageTable(caption="About the measurement", heads=("",), rows=[(line,) for line in _about(beside)]),
        *prediction_tables(beside.main),
    ]


def _rows(beside: Beside) -> Iterator[tuple[str, str, str, str]]:
    for peak in beside.measured.peaks:
        predicted, measured = beside.predicted_bytes(peak), beside.measured_bytes(peak)
        yield _name(peak), gib(predicted), gib(measured), f"{predicted / measured - 1:+.1%}" if measured > 0 else ""
        if peak.reserved_bytes:
            reserved = beside.predictions[peak.phase].reserved_bytes
            yield "  reserved", gib(reserved), gib(peak.reserved_bytes), f"{reserved / peak.reserved_bytes - 1:+.1%}"


def _name(peak: PhasePeak) -> str:
    return peak.phase if peak.step is None else f"{peak.phase}, step {peak.step}"


def _about(beside: Beside) -> Iterator[str]:
    measured = beside.measured
    if measured.kind == "cpu":
        yield f"measured: the resident set, less the {gib(measured.baseline_bytes)} GiB that were there before"
    yield from measured.notes
    if measured.leak is not None:
        yield f"warning: a leak? {measured.leak}"
