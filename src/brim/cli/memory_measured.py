"""Measured beside predicted: as a table, as a picture, and as tables of a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.api.memory_measure import Beside
from brim.memory.measure.result import Leak, PhasePeak, Stayed
from brim.report.memory_plot import Overlay, memory_plot
from brim.report.memory_table import gib, headline, operator_and_module
from brim.report.memory_tables import prediction_tables
from brim.report.page import PageTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 5  # kinds of tensors that stayed
_SHOWN_SPIKES = 6


def print_measured(console: Console, beside: Beside, *, title: str) -> None:
    """Each phase predicted and measured, the highest points in time, a leak."""
    measured = beside.measured
    shape = headline(beside.main, title=title).rpartition(", on ")[0]
    console.print(Text(f"{shape}: predicted, and measured on {measured.device}", style="bold"))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("predicted GiB", "measured GiB", "difference"):
        table.add_column(name, justify="right")
    for row in _rows(beside):
        table.add_row(*row)
    console.print(table)
    for line in (*_points_in_time(beside), *_about(beside)):
        console.print(Text(line))


def measured_picture(beside: Beside, *, title: str) -> Figure:
    """The predicted timeline with the measured line over it, where one was recorded."""
    timeline, measured = beside.measured.timeline, beside.measured
    overlay = None
    if timeline is not None:
        on_cpu = measured.kind == "cpu"
        overlay = Overlay(
            label=f"measured on {measured.device}" + (", resident set" if on_cpu else ""),
            live_bytes=timeline.live_bytes,
            marks=timeline.marks,
            num_steps=sum(peak.phase == "train" for peak in measured.peaks),
            baseline_bytes=_before(beside),
        )
    return memory_plot(beside.main, title=title, overlay=overlay)


def measured_tables(beside: Beside) -> list[PageTable]:
    """Predicted beside measured, the highest points of both, and what was said of it."""
    timeline = beside.measured.timeline
    tables = [
        PageTable(
            caption="Predicted and measured, GiB",
            heads=("phase", "predicted", "measured", "difference"),
            rows=list(_rows(beside)),
        )
    ]
    if timeline is not None:
        rows = [
            (label, operator_and_module(spike.place), gib(spike.live_bytes - _before(beside)))
            for (_, label), spike in zip(timeline.marks, timeline.spikes, strict=True)
        ]
        tables.append(
            PageTable(
                caption="Measured: the highest points",
                heads=("phase", "operator and module", "GiB"),
                rows=rows,
                num_texts=2,
            )
        )
    about = [(line,) for line in _about(beside)]
    return [
        *tables,
        PageTable(caption="About the measurement", heads=("",), rows=about),
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


def _points_in_time(beside: Beside) -> Iterator[str]:
    """The highest of the phases over time, in their order."""
    timeline = beside.measured.timeline
    if timeline is None:
        return
    before = _before(beside)
    found = list(zip(timeline.marks, timeline.spikes, strict=True))
    highest = {id(each) for each in sorted(found, key=lambda each: -each[1].live_bytes)[:_SHOWN_SPIKES]}
    for each in found:
        if id(each) in highest:
            (_, label), spike = each
            yield f"{label}: {gib(spike.live_bytes - before)} GiB at most, {operator_and_module(spike.place)}"


def _before(beside: Beside) -> int:
    """What was there before, in the figures of a measurement over time."""
    return beside.measured.baseline_bytes if beside.measured.kind == "cpu" else 0


def _about(beside: Beside) -> Iterator[str]:
    measured = beside.measured
    if measured.kind == "cpu":
        yield f"measured: the resident set, less the {gib(measured.baseline_bytes)} GiB that were there before"
    yield from measured.notes
    if measured.snapshot is not None:
        yield f"memory snapshot, for pytorch.org/memory_viz: {measured.snapshot}"
    if measured.leak is not None:
        yield from _leak(measured.leak)


def _leak(leak: Leak) -> Iterator[str]:
    yield f"warning: a leak? {leak}"
    for stayed in leak.stayed[:_SHOWN]:
        yield f"  {_stayed(stayed)}"


def _stayed(stayed: Stayed) -> str:
    shape = "" if stayed.shape is None else f" of {'×'.join(map(str, stayed.shape)) or 'one number'}"
    kind = f" {stayed.dtype}" if stayed.dtype else ""
    made = f", made at {stayed.made_at}" if stayed.made_at else ""
    return f"{stayed.count:,}{kind} tensors{shape} stayed, {stayed.num_bytes:,} bytes{made}"
