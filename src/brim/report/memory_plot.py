"""The memory of a step over time, as stacked areas by category; a measurement laid over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.memory.events import CATEGORIES
from brim.memory.prediction import MemoryPrediction, Timeline
from brim.report.categories import LOOKS
from brim.report.matplotlib_import import new_figure
from brim.report.memory_table import GIB, gib, headline, operator_and_module
from brim.report.phases import aligned, phases
from brim.report.steps import with_steps
from brim.report.thin import thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PAPER, FAINT = "#1A1A1B", "#FEFEFD", "#8A8A8B"  # each once only, so that a page can put its own in their place
LIMIT = "#C00000"
_POINTS = 800  # of a line; more are not seen
_MOST_SPIKES = 8
_CIRCLE = 14.0  # points across
_MOST_NAMES = 12
_ROW_HEIGHT = 0.045  # of a row of phase names, in parts of the axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A measured line, to be laid over the predicted areas."""

    label: str  # such as "measured on cpu, resident set"
    live_bytes: NDArray[np.int64]  # [E]
    marks: tuple[tuple[int, str], ...]  # (point, what begins there), named as in report/phases.py
    num_steps: int = 0  # of training
    baseline_bytes: int = 0  # taken off: what was there before


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The highest point between two marks."""

    point: int
    during: str  # the mark before it
    live_bytes: int
    where: str  # operator and module


def memory_plot(prediction: MemoryPrediction, *, title: str, overlay: Overlay | None = None) -> Figure:
    """The predicted timeline, with reserved memory, the device's, the phases and the spikes. title: of the model.

    overlay: a measurement, whose steps the timeline is drawn for.
    """
    figure = new_figure(12, 7.5, paper=PAPER)
    axes = figure.add_axes((0.065, 0.33, 0.735, 0.50), facecolor=PAPER)
    timeline, heading = prediction.timeline, headline(prediction, title=title)
    if overlay is not None:
        timeline, heading = (
            with_steps(timeline, overlay.num_steps),
            f"{heading.rpartition(', on ')[0]}, {overlay.label}",
        )
    _areas(axes, timeline)
    top = int(timeline.reserved_bytes.max())
    if overlay is not None:
        top = max(top, _lay_over(axes, overlay, timeline))
    _device_line(axes, prediction, top)
    _frame(axes, len(timeline.reserved_bytes))
    _phases(axes, timeline)
    found = spikes(timeline)
    _number_spikes(axes, found)
    _say_spikes(figure, found)
    figure.text(0.065, 0.965, heading, size=14, weight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.065, 0.925, _verdict(prediction), size=10, color=INK, va="top", parse_math=False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9.5, labelcolor=INK, reverse=True
    )
    return figure


def spikes(timeline: Timeline) -> list[Spike]:
    """The highest point of each phase, in order; the highest phases where there are many."""
    allocated = timeline.allocated_bytes()
    marks = phases(timeline)
    ends = [*(point for point, _ in marks[1:]), len(allocated)]
    found = []
    for (start, label), end in zip(marks, ends, strict=True):
        point = start + int(allocated[start:end].argmax())
        where = operator_and_module(timeline.places[point])
        found.append(Spike(point=point, during=label, live_bytes=int(allocated[point]), where=where))
    highest = sorted(found, key=lambda spike: -spike.live_bytes)[:_MOST_SPIKES]
    return sorted(highest, key=lambda spike: spike.point)


def _areas(axes: Axes, timeline: Timeline) -> None:
    allocated = timeline.allocated_bytes()
    keep = thinned(allocated, most=_POINTS)
    shown = [category for category in CATEGORIES if timeline.live_bytes[category].any()]
    areas = axes.stackplot(
        keep,
        [timeline.live_bytes[category][keep] / GIB for category in shown],
        labels=[LOOKS[category].label for category in shown],
        colors=[LOOKS[category].colour for category in shown],
        step="post",
    )
    for area, category in zip(areas, shown, strict=True):
        area.set(edgecolor=LOOKS[category].colour, linewidth=0.8)  # so that a spike of one point is seen
    reserved = timeline.reserved_bytes
    axes.plot(
        keep,
        reserved[keep] / GIB,
        color=FAINT,
        lw=1.4,
        ls=(0, (4, 2)),
        drawstyle="steps-post",
        label="reserved by PyTorch",
    )


def _lay_over(axes: Axes, overlay: Overlay, timeline: Timeline) -> int:
    """Draw the measured line; its highest point, in bytes."""
    live = overlay.live_bytes - overlay.baseline_bytes
    x = aligned(len(live), overlay.marks, timeline)
    keep = thinned(live, most=_POINTS)
    axes.plot(x[keep], live[keep] / GIB, color=INK, lw=1.4, label=overlay.label.replace(", ", ",\n"))
    return int(live.max())


def _device_line(axes: Axes, prediction: MemoryPrediction, top: int) -> None:
    """What the device leaves to PyTorch, unless it lies far above all that is drawn. top: bytes."""
    if prediction.budget_bytes is not None:
        room = prediction.budget_bytes - prediction.outside_bytes
        if room <= 2 * top:
            label = f"{prediction.device}, less {gib(prediction.outside_bytes)} GiB\noutside PyTorch"
            axes.axhline(room / GIB, color=LIMIT, lw=1.6, label=label)
            top = max(top, room)
    axes.set_ylim(0, 1.04 * top / GIB)


def _frame(axes: Axes, num_points: int) -> None:
    axes.set_xlim(0, max(num_points - 1, 1))
    axes.set_ylabel("GiB", color=INK)
    axes.set_xlabel("allocations and releases, in their order", color=INK)
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=FAINT, lw=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_color(FAINT)
        spine.set_visible(name in ("left", "bottom"))


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Names of the phases above the areas, each where it begins, in as many rows as keep them apart."""
    ends: list[float] = []  # of the last name in each row, in pixels
    for point, label in _named(phases(timeline)):
        text = axes.annotate(
            label,
            (point, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 3),
            textcoords="offset points",
            size=8.5,
            color=INK,
            annotation_clip=False,
            parse_math=False,
        )
        box = text.get_window_extent()
        row = next((number for number, end in enumerate(ends) if box.x0 > end), len(ends))
        ends[row : row + 1] = [box.x1 + 6]
        text.set_position((2, 3 + 12 * row))
        axes.axvline(point, color=FAINT, lw=0.7, ymax=1, zorder=2.5)
        axes.plot(
            [point, point],
            [1, 1.02 + _ROW_HEIGHT * row],
            transform=axes.get_xaxis_transform(),
            color=FAINT,
            lw=0.7,
            clip_on=False,
        )


def _named(marks: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    """The marks whose names have room: all, else where steps begin, or another phase does; else some of these."""
    if len(marks) <= _MOST_NAMES:
        return marks
    steps = [(point, label.removesuffix(": forward")) for point, label in marks if label.endswith(": forward")]
    changes = [mark for before, mark in pairwise([(-1, ""), *marks]) if mark[1] != before[1]]
    named = steps or changes
    return named[:: -(-len(named) // _MOST_NAMES)]


def _number_spikes(axes: Axes, found: Sequence[Spike]) -> None:
    """A number above each spike; higher where it would stand on another."""
    placed: list[tuple[float, float]] = []  # in points
    points_per_pixel = 72 / axes.figure.dpi
    for number, spike in enumerate(found, start=1):
        x, y = axes.transData.transform((spike.point, spike.live_bytes / GIB)) * points_per_pixel
        up = 9.0
        while any(abs(x - other_x) < _CIRCLE and abs(y + up - other_y) < _CIRCLE for other_x, other_y in placed):
            up += 2
        placed.append((x, y + up))
        axes.annotate(
            str(number),
            (spike.point, spike.live_bytes / GIB),
            xytext=(0, up),
            textcoords="offset points",
            ha="center",
            va="center",
            size=8,
            color=PAPER,
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": INK, "edgecolor": PAPER, "linewidth": 0.8},
            zorder=5,
        )


def _say_spikes(figure: Figure, found: Sequence[Spike]) -> None:
    """The list below the axes: what is at each number."""
    columns = (0.065, 0.092, 0.235, 0.325)
    heads = ("", "highest of", "GiB", "operator and module")
    highest = max((spike.live_bytes for spike in found), default=0)
    for row, cells in enumerate([heads, *(_cells(number, spike) for number, spike in enumerate(found, start=1))]):
        is_bold = row == 0 or found[row - 1].live_bytes == highest
        for x, cell in zip(columns, cells, strict=True):
            weight = "bold" if is_bold else "normal"
            figure.text(x, 0.225 - 0.024 * row, cell, size=9, color=INK, weight=weight, va="top", parse_math=False)


def _cells(number: int, spike: Spike) -> tuple[str, str, str, str]:
    return str(number), spike.during, gib(spike.live_bytes), spike.where


def _verdict(prediction: MemoryPrediction) -> str:
    allocated, reserved, total = prediction.allocated_bytes, prediction.reserved_bytes, prediction.total_bytes
    figures_told = (
        f"allocated {gib(allocated)} GiB at most, reserved {gib(reserved)}, with what lies outside {gib(total)}"
    )
    if prediction.budget_bytes is None:
        return figures_told
    fits = "fits in" if prediction.fits else "does not fit in"
    return f"{figures_told}: {fits} {gib(prediction.budget_bytes)} GiB"
