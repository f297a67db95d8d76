"""Draw the memory of a step over time as stacked areas by category, and that of several variants as stacked bars.

The phases of a predicted timeline are named; points that do not change the look of a line are left out. The numbers of
a prediction are given as tables for an HTML page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.memory import MemoryPrediction, Timeline
from brim.memory.events import CATEGORIES
from brim.report.memory import LOOKS, Part, facts, total_by_part
from brim.report.picture import FAINT, INK, PAPER, PageTable, frame, new_figure
from brim.units import GIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def prediction_tables(prediction: MemoryPrediction) -> list[PageTable]:
    """Return tables of the categories at the peak, the highest point of each phase, and all that was decided."""
    parts = {part: num_bytes for part, num_bytes in total_by_part(prediction).items() if num_bytes}
    return [
        PageTable(
            caption="At the peak",
            heads=("part", "what it is", "GiB", "bytes"),
            rows=[(LOOKS[part].label, LOOKS[part].meaning, gib(size), f"{size:,}") for part, size in parts.items()]
            + [("needed on the device", "", gib(prediction.total_bytes), f"{prediction.total_bytes:,}")],
            colours=[*(LOOKS[part].colour for part in parts), "transparent"],
            num_texts=2,
        ),
        PageTable(
            caption="The highest point of each phase",
            heads=("phase", "operator and module", "GiB"),
            rows=[(spike.during, spike.where, gib(spike.live_bytes)) for spike in spikes(prediction.timeline)],
            num_texts=2,
        ),
        PageTable(caption="What was found and chosen", heads=("",), rows=[(fact,) for fact in facts(prediction)]),
    ]


LIMIT = "#C00000"


_POINTS = 800  # of a line; more cannot be seen


_MOST_SPIKES = 8


_CIRCLE = 14.0  # points across


_MOST_NAMES = 12


_NAME_HEIGHT = 0.035  # of a device's name, as a share of the axes


_ROW_HEIGHT = 0.045  # of a row of phase names, as a share of the axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """Hold the highest point between two marks."""

    point: int
    during: str  # the mark before it
    live_bytes: int
    where: str  # operator and module


def memory_plot(prediction: MemoryPrediction, *, title: str, measured_bytes: int | None = None) -> Figure:
    """Draw the predicted timeline with the reserved and the device's memory, phases and spikes. title: of the model.

    measured_bytes: the most that was measured, for a line.
    """
    figure = new_figure(12, 7.5)
    axes = figure.add_axes((0.065, 0.33, 0.735, 0.50), facecolor=PAPER)
    timeline, heading = prediction.timeline, f"{title}: {prediction.shape_in_words()}"
    _areas(axes, timeline)
    top = int(timeline.reserved_bytes.max())
    if measured_bytes is not None:
        axes.axhline(measured_bytes / GIB, color=INK, lw=1.4, label="measured, at most")
        top = max(top, measured_bytes)
    _device_line(axes, prediction, top)
    _frame(axes, len(timeline.reserved_bytes))
    _phases(axes, timeline)
    found = spikes(timeline)
    _number_spikes(axes, found)
    _list_spikes(figure, found)
    figure.text(0.065, 0.965, heading, size=14, weight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.065, 0.925, _verdict(prediction), size=10, color=INK, va="top", parse_math=False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9.5, labelcolor=INK, reverse=True
    )
    return figure


def variants_plot(
    variants: Mapping[str, Mapping[Part, int]], *, title: str, subtitle: str, cards: Mapping[str, int]
) -> Figure:
    """Draw a bar for each variant: bytes by part. cards: bytes of the devices that are drawn as lines across."""
    figure = new_figure(12, 7)
    figure.text(0.065, 0.965, title, size=14, weight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.065, 0.92, subtitle, size=10, color=INK, va="top", parse_math=False)
    axes = figure.add_axes((0.065, 0.1, 0.63, 0.76), facecolor=PAPER)
    axes.set_ylabel("GiB", color=INK)
    ends = np.zeros(len(variants))
    for part, look in LOOKS.items():
        sizes = np.array([parts.get(part, 0) / GIB for parts in variants.values()])
        if sizes.any():
            bars = axes.bar(range(len(variants)), sizes, 0.7, bottom=ends, color=look.colour, label=look.label)
            ends += sizes
    labels = [f"{gib(sum(parts.values()))} GiB" for parts in variants.values()]
    paper = {"facecolor": PAPER, "linewidth": 0, "pad": 1}
    axes.bar_label(bars, labels, padding=4, size=10, weight="bold", color=INK, bbox=paper, zorder=4)
    top = 1.06 * max([*ends, *(num_bytes / GIB for num_bytes in cards.values())])
    name_at = 0.0
    for card, num_bytes in sorted(cards.items(), key=lambda each: each[1]):
        axes.axhline(num_bytes / GIB, color=LIMIT, lw=1.3, zorder=3)
        name_at = max(num_bytes / GIB, name_at + _NAME_HEIGHT * top)  # names that would touch stand higher
        name = f"{card}, {gib(num_bytes)} GiB"
        axes.text(1.01, name_at, name, transform=axes.get_yaxis_transform(), size=9, color=INK, va="center")
    axes.set_ylim(0, top)
    frame(axes, below="", text=str)
    axes.set_xticks(range(len(variants)), [name.replace(" + ", "\n+ ") for name in variants], size=10)
    figure.legend(loc="upper left", bbox_to_anchor=(0.84, 0.87), frameon=False, labelcolor=INK, reverse=True)
    return figure


def spikes(timeline: Timeline) -> list[Spike]:
    """Return the highest point of each phase, in order; only the highest ones where there are many."""
    allocated = timeline.allocated_bytes()
    marks = phases(timeline)
    ends = [*(point for point, _ in marks[1:]), len(allocated)]
    found = []
    for (start, label), end in zip(marks, ends, strict=True):
        point = start + int(allocated[start:end].argmax())
        where = timeline.places[point].where
        found.append(Spike(point=point, during=label, live_bytes=int(allocated[point]), where=where))
    highest = sorted(found, key=lambda spike: -spike.live_bytes)[:_MOST_SPIKES]
    return sorted(highest, key=lambda spike: spike.point)


def _areas(axes: Axes, timeline: Timeline) -> None:
    allocated = timeline.allocated_bytes()
    keep = downsampled(allocated, most=_POINTS)
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


def _device_line(axes: Axes, prediction: MemoryPrediction, top: int) -> None:
    """Draw a line at what the device leaves to PyTorch, unless it lies far above everything else. top: bytes."""
    if prediction.budget_bytes is not None:
        available = prediction.budget_bytes - prediction.outside_bytes
        if available <= 2 * top:
            label = f"{prediction.device}, less {gib(prediction.outside_bytes)} GiB\noutside PyTorch"
            axes.axhline(available / GIB, color=LIMIT, lw=1.6, label=label)
            top = max(top, available)
    axes.set_ylim(0, 1.04 * top / GIB)


def _frame(axes: Axes, num_points: int) -> None:
    axes.set_xlim(0, max(num_points - 1, 1))
    axes.set_ylabel("GiB", color=INK)
    frame(axes, below="allocations and releases, in their order", text=lambda value: f"{value:,.0f}")


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Write the names of the phases above the areas, each where it begins, in as many rows as keep them apart."""
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
    """Return the marks whose names fit: all, else those where another phase begins, or some of these."""
    if len(marks) <= _MOST_NAMES:
        return marks
    changes = [mark for before, mark in pairwise([(-1, ""), *marks]) if mark[1] != before[1]]
    return changes[:: -(-len(changes) // _MOST_NAMES)]


def _number_spikes(axes: Axes, found: Sequence[Spike]) -> None:
    """Draw a number above each spike; place it higher where it would cover another."""
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


def _list_spikes(figure: Figure, found: Sequence[Spike]) -> None:
    """Write the list below the axes that explains each number."""
    columns = (0.065, 0.092, 0.235, 0.325)
    heads = ("", "highest of", "GiB", "operator and module")
    highest = max((spike.live_bytes for spike in found), default=0)
    listed = [(str(n), spike.during, gib(spike.live_bytes), spike.where) for n, spike in enumerate(found, start=1)]
    for row, cells in enumerate([heads, *listed]):
        is_bold = row == 0 or found[row - 1].live_bytes == highest
        for x, cell in zip(columns, cells, strict=True):
            weight = "bold" if is_bold else "normal"
            figure.text(x, 0.225 - 0.024 * row, cell, size=9, color=INK, weight=weight, va="top", parse_math=False)


def _verdict(prediction: MemoryPrediction) -> str:
    allocated, reserved, total = prediction.allocated_bytes, prediction.reserved_bytes, prediction.total_bytes
    figures = f"allocated {gib(allocated)} GiB at most, reserved {gib(reserved)}, with what lies outside {gib(total)}"
    if prediction.budget_bytes is None:
        return figures
    fits = "fits in" if prediction.fits else "does not fit in"
    return f"{figures}: {fits} {gib(prediction.budget_bytes)} GiB"


Mark = tuple[int, str]  # (point, what begins there)


def phases(timeline: Timeline) -> list[Mark]:
    """Return the marks, and between them the turns from forward to backward and from prefill to decode.

    Their names are such as "step 1: forward", "step 1: backward", "step 1: optimizer"; for evaluation and generation
    "evaluate", "prefill" and "decode". A phase without points is left out.
    """
    ends = [point for point, _ in timeline.marks[1:]] + [len(timeline.places)]
    found: list[Mark] = []
    for (start, label), end in zip(timeline.marks, ends, strict=True):
        if end > start:
            found += _of_segment(timeline, start, end, label)
    return found


def _of_segment(timeline: Timeline, start: int, end: int, label: str) -> list[Mark]:
    first = timeline.places[start].phase
    if ":" in label or first == "load":
        return [(start, label)]
    step = label.split(",")[0]
    prefix = f"{step}: " if step.startswith("step") else ""
    turn = next((point for point in range(start, end) if timeline.places[point].phase in ("backward", "decode")), None)
    found = [(start, prefix + first)]
    if turn is not None and turn > start:
        found.append((turn, prefix + timeline.places[turn].phase))
    return found


def downsampled(values: NDArray[np.int64], *, most: int) -> NDArray[np.intp]:
    """Return at most `most` positions to keep, in order: the first, the last, and each stretch's lowest and highest.

    values: [E]. No spike is lost, however short.
    """
    num_points = len(values)
    if num_points <= most:
        return np.arange(num_points)
    edges = np.linspace(0, num_points, max((most - 2) // 2, 1) + 1).astype(int)
    kept = {0, num_points - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept |= {start + int(stretch.argmin()), start + int(stretch.argmax())}
    return np.array(sorted(kept), dtype=np.intp)
