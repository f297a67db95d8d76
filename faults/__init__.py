"""The fault campaign: what goes wrong around a run is made to go wrong, and what brim then does is judged.

A module of this package holds one fault. It exposes

    def run(settings: Settings) -> Iterator[Trial]

which is called in a process of its own, yields each trial as soon as it is judged, and stands in `faults/catalogue.py`.
It never stops at a failure: a failed trial is a `Trial`, an exception is a mistake of the campaign itself.

    python -m faults                     # the whole campaign: benchmarks/results/faults.json and docs/reliability.md
    python -m faults --short             # what CI runs; writes nothing
    python -m faults --only kill --seed 7
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from faults.forked import Brim

__all__ = ["Outcome", "Settings", "Trial"]

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a fault's module is told."""

    folder: Path  # an empty one, of its own, to do everything in; deleted at the end
    brim: Brim  # runs commands; shared with the other faults, since its start takes seconds
    short: bool  # a few trials that end in seconds, instead of all
    seed: int  # of all that is drawn by chance
    worker: int = 0  # this process does the trials whose number modulo `num_workers` is `worker`
    num_workers: int = 1

    def is_mine(self, number: int) -> bool:
        """Whether the trial of this number (0-based, over the whole fault) is for this process to do."""
        return number % self.num_workers == self.worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One thing that was made to go wrong, and whether brim did what it promises."""

    row: str  # of the table in docs/reliability.md; trials of one row are counted together
    case: str  # what exactly was done: enough to do it again
    outcome: Outcome
    why: str = ""  # what was seen instead, where it failed; why it could not be tried, where it was skipped
