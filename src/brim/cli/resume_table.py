"""What a tried resumption showed, as a table: what was compared, what is promised of it, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.units import format_count

if TYPE_CHECKING:
    from brim.api.resume_comparison import Check, Difference
    from brim.api.resume_proof import ResumeProof


def print_proof(proof: ResumeProof) -> None:
    """The table, the verdict, and each difference in full."""
    console = Console(highlight=False)
    for line in _head(proof):
        console.print(Text(line))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "compared", "promised", "found"):
        table.add_column(name)
    for check in proof.checks:
        style = "" if check.holds else "bold red"
        table.add_row(
            *(Text(cell) for cell in (check.name, check.compared, _promised(check), check.found)), style=style
        )
    console.print(table)
    console.print()
    for check in proof.checks:
        if check.difference is not None:
            console.print(Text(_difference(check, check.difference)))
    console.print(Text(f"the run's own log {proof.own_log}"))
    console.print(Text(proof.verdict, style="bold"))


def _head(proof: ResumeProof) -> Iterator[str]:
    first, last = proof.start_step + 1, proof.start_step + proof.num_steps
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    source = f"the checkpoint of step {proof.checkpoint_step:,}" if proof.checkpoint_step else "the start of the run"
    yield f"{steps} of {proof.run}, from {source}; {proof.device}, {proof.precision}"
    yield f"rows of a step: {_sizes(proof.effective_batch_sizes)}"
    stopped = (
        "" if proof.stopped_after is None else f"stopped by Ctrl-C after step {proof.stopped_after:,}, continued, "
    )
    yield f"disturbed: {stopped}killed by SIGKILL in step {proof.killed_in:,} {proof.killed_where}, continued"


def _sizes(sizes: Sequence[int]) -> str:
    """8 (6 steps), then 16 (2 steps)."""
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    return ", then ".join(f"{size:,} ({format_count(num, 'step')})" for size, num in runs)


def _promised(check: Check) -> str:
    if check.promise == "open":
        return "nothing"
    return "equal" if check.promise == "bits" else f"within {check.tolerance:g}"


def _difference(check: Check, difference: Difference) -> str:
    size = "" if difference.max_abs is None else f"; at most by {difference.max_abs:.3g}"
    if difference.relative is not None and math.isfinite(difference.relative):
        size += f" ({difference.relative:.3g} relative)"
    more = f"; {difference.num:,} values differ" if difference.num > 1 else ""
    return (
        f"{check.name}: first at {difference.where}: {difference.undisturbed} without a break, {difference.disturbed} "
        f"with{more}{size}"
    )
