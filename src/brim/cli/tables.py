"""Figures as tables, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def print_metrics(by_split: Mapping[str, Mapping[str, float]]) -> None:
    """One row a metric, one column a split."""
    if not by_split:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for split in by_split:
        table.add_column(split, justify="right")
    for name in next(iter(by_split.values())):
        figures = (_figure(name, metrics[name]) for metrics in by_split.values())
        table.add_row(name.removeprefix("num_").replace("_", " "), *figures)
    Console(highlight=False).print(table)


def finite_or_null(value: float) -> float | None:
    """The figure for JSON, which has no word for NaN and infinity."""
    return value if math.isfinite(value) else None


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name.startswith("num_") else f"{value:.4f}"
