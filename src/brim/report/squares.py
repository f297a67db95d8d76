"""Draw the variants of a run as piles of squares, beside each other, with devices as lines across."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from brim.report.memory import LOOKS, Part, square_bytes_for, squares
from brim.report.memory_figure import LIMIT
from brim.report.picture import INK, PAPER, new_figure
from brim.units import GIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_GAP = 2.5  # squares between piles


_LABELS = 8.0  # width for the devices' names at the right, in squares


_SIDE = 0.86  # of a square that is drawn, as a share of its place


_JOINT = (1 - _SIDE) / 2


_PAGE_INCHES, _WIDTH_INCHES = 12.0, 9.9  # widths of the figure and of the axes


_MOST_INCHES = 5.4  # height of the highest pile


_HEAD_INCHES, _FOOT_INCHES, _ABOVE_INCHES = 1.0, 0.8, 0.35  # titles, names below, totals above the piles


_LINE_INCHES = 0.2  # between the names of devices


def squares_plot(
    variants: Mapping[str, Mapping[Part, int]], *, title: str, subtitle: str, cards: Mapping[str, int]
) -> Figure:
    """Draw a pile for each variant: bytes by part. cards: bytes of the devices that are drawn as lines across."""
    most_bytes = max([*(sum(parts.values()) for parts in variants.values()), *cards.values()])
    square_bytes = square_bytes_for(most_bytes)
    highest = most_bytes / square_bytes
    wide = max(range(3, 21), key=lambda each: _inches(each, highest, len(variants)))
    inches = _inches(wide, highest, len(variants))
    height = (highest / wide + 1) * inches + _ABOVE_INCHES
    whole = height + _HEAD_INCHES + _FOOT_INCHES
    figure = new_figure(_PAGE_INCHES, whole, paper=PAPER)
    axes = figure.add_axes((0.03, _FOOT_INCHES / whole, _WIDTH_INCHES / _PAGE_INCHES, height / whole), facecolor=PAPER)
    axes.set_xlim(-0.5, _WIDTH_INCHES / inches - 0.5)
    axes.set_ylim(0, height / inches)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    lefts = [number * (wide + _GAP) for number in range(len(variants))]
    for left, (name, parts) in zip(lefts, variants.items(), strict=True):
        _pile(axes, name, parts, square_bytes=square_bytes, left=left, wide=wide)
    _cards(axes, cards, square_bytes=square_bytes, lefts=lefts, wide=wide, apart=_LINE_INCHES / inches)
    figure.text(0.03, 1 - 0.25 / whole, title, size=14, weight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.03, 1 - 0.56 / whole, subtitle, size=10, color=INK, va="top", parse_math=False)
    shown = {part for parts in variants.values() for part in squares(parts, square_bytes=square_bytes)}
    _legend(figure, shown, square_bytes=square_bytes, top=1 - _HEAD_INCHES / whole)
    return figure


def _inches(wide: int, highest: float, num_piles: int) -> float:
    """Return the largest side of a square with which all piles, so many squares wide, fit into the figure."""
    width = num_piles * (wide + _GAP) + _LABELS
    return min(_WIDTH_INCHES / width, _MOST_INCHES / (highest / wide + 1))


def _pile(axes: Axes, name: str, parts: Mapping[Part, int], *, square_bytes: int, left: float, wide: int) -> None:
    from matplotlib.patches import Rectangle

    filled = squares(parts, square_bytes=square_bytes)
    for number, part in enumerate(filled):
        x, y = left + number % wide, number // wide
        axes.add_patch(Rectangle((x, y), _SIDE, _SIDE, facecolor=LOOKS[part].colour, linewidth=0))
    middle = left + (wide - 1 + _SIDE) / 2
    axes.annotate(
        f"{gib(sum(parts.values()))} GiB",
        (middle, -(-len(filled) // wide)),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        size=10,
        weight="bold",
        color=INK,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": PAPER, "linewidth": 0},
        zorder=4,
    )
    axes.annotate(
        name.replace(" + ", "\n+ "),
        (middle, 0),
        xytext=(0, -6),
        textcoords="offset points",
        ha="center",
        va="top",
        size=10,
        color=INK,
        annotation_clip=False,
        parse_math=False,
    )


def _cards(
    axes: Axes, cards: Mapping[str, int], *, square_bytes: int, lefts: Sequence[float], wide: int, apart: float
) -> None:
    """Draw where each device is full, as a step between squares across each pile; move up names that would touch."""
    right = lefts[-1] + wide + 0.5
    least = -apart
    for name, num_bytes in sorted(cards.items(), key=lambda card: card[1]):
        row, part = divmod(num_bytes / square_bytes, wide)
        for left in lefts:
            low, high, turn = row - _JOINT, row + 1 - _JOINT, left + part - _JOINT
            axes.plot(
                [left - 0.4, turn, turn, left + wide + 0.3],
                [high, high, low, low],
                color=LIMIT,
                lw=1.3,
                zorder=3,
            )
        least = max(row + 0.5, least + apart)
        axes.text(right + 0.5, least, f"{name}, {gib(num_bytes)} GiB", size=9, color=INK, va="center", parse_math=False)


def _legend(figure: Figure, shown: Collection[Part], *, square_bytes: int, top: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=LOOKS[part].colour, label=LOOKS[part].label) for part in LOOKS if part in shown]
    legend = figure.legend(
        handles=handles[::-1],
        loc="upper left",
        bbox_to_anchor=(0.855, top),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=1,
        handleheight=1,
        title=f"a square is {square_bytes // GIB:,} GiB",
        alignment="left",
    )
    legend.get_title().set(color=INK, fontsize=9.5)
