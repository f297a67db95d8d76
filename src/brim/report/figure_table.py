"""Figures with their intervals as tables, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol


class HasEnds(Protocol):
    """An interval."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


Intervals = Mapping[str, HasEnds]


def figure_lines(metrics: Mapping[str, float], intervals: Intervals, *, title: str) -> list[str]:
    """A line for each metric, those without an interval last."""
    cells = [(name, [_cell(metrics[name], intervals.get(name))]) for name in _with_intervals_first(metrics, intervals)]
    lines = _table([title], cells)
    return [*lines, "", _ABOUT]


def comparison_lines(
    columns: Sequence[tuple[str, Mapping[str, float], Intervals]],
    differences: Mapping[str, float],
    difference_intervals: Intervals,
    *,
    notes: Sequence[str] = (),
) -> list[str]:
    """Each model's figures side by side, and how they differ. columns: a title, figures and their intervals."""
    cells = [
        (
            name,
            [
                *(_cell(metrics[name], intervals.get(name)) for _, metrics, intervals in columns),
                _cell(difference, difference_intervals[name], sign="+"),
            ],
        )
        for name, difference in differences.items()
    ]
    lines = _table([*(title for title, _, _ in columns), "difference, paired"], cells)
    return [*lines, "", _ABOUT, *notes]


_ABOUT = "In brackets: 95% intervals, bootstrap over rows. Loss in nats a token."


def words_of(name: str) -> str:
    """A metric as people call it."""
    return name.removeprefix("num_").replace("_", " ")


def _with_intervals_first(metrics: Mapping[str, float], intervals: Intervals) -> list[str]:
    return sorted(metrics, key=lambda name: name not in intervals)


def _cell(value: float, interval: HasEnds | None, *, sign: str = "") -> str:
    if interval is None:
        return f"{value:,.0f}"
    return f"{value:{sign}.4f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _table(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    named = [("", titles), *((words_of(name), cells) for name, cells in rows)]
    first = max(len(name) for name, _ in named)
    widths = [max(len(cells[column]) for _, cells in named) for column in range(len(titles))]

    def lines() -> Iterator[str]:
        for name, cells in named:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            yield "  ".join([name.ljust(first), *padded]).rstrip()

    return list(lines())
