"""Figures as tables, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

_WHOLE_NUMBERS = ("num_rows", "num_supervised_tokens")


def print_metrics(by_split: Mapping[str, Mapping[str, float]]) -> None:
    """One row a split, one column a metric."""
    if not by_split:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = list(next(iter(by_split.values())))
    table.add_column("split")
    for name in names:
        table.add_column(name.removeprefix("num_").replace("_", " "), justify="right")
    for split, metrics in by_split.items():
        table.add_row(split, *(_figure(name, metrics[name]) for name in names))
    Console(highlight=False, width=None).print(table)


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in _WHOLE_NUMBERS else f"{value:.4f}"
