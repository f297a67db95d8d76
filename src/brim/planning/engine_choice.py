"""Which engine writes a job's responses: the fastest on a sample of its prompts, where a sample costs little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.units import format_seconds

MOST_S = 30.0
_SHARE_OF_RUN = 0.02
_SETS_OF_ROWS = 2  # with fewer rows than twice those that run together, none takes the place of another
_LEAST_GAIN = 1.05  # for less, jobs would change their engine with what else the machine does

SLOTS, STATIC, PAGED = "slots", "static", "paged"
UNREFILLED = "slots without refilling"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What writes the responses, and why."""

    kind: str
    reason: str
    rows_per_s: Mapping[str, float] | None = None  # of each that was measured

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "reason": self.reason, "rows_per_s": dict(self.rows_per_s or {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What to measure with. Without positions, `reason` says why nothing is measured."""

    positions: tuple[int, ...]  # of prompts
    allowed_s: float  # for all engines together
    reason: str


def sample_of(lengths: ArrayLike, *, rows: int, num_engines: int, run_s: float | None) -> Sample:
    """Prompts of about the median length, enough for rows to take the place of others.

    lengths: tokens of the job's prompts. rows: that run together. run_s: the job's estimated seconds, of which a small
    share may go into measuring; None: not known.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    wanted = _SETS_OF_ROWS * rows
    if num_engines < 2:
        return _none("no other engine can write these responses")
    if run_s is None:
        return _none("it is not known how long the job takes")
    if wanted > len(tokens):
        return _none(f"{len(tokens):,} rows are fewer than two sets of the {rows:,} that run together")
    allowed_s = min(_SHARE_OF_RUN * run_s, MOST_S)
    positions = _middle(tokens, wanted)
    needed_s = num_engines * run_s * float(tokens[positions].sum() / tokens.sum())
    if needed_s > allowed_s:
        return _none(
            f"measuring {num_engines} engines takes about {format_seconds(needed_s)}, more than "
            f"{format_seconds(allowed_s)}: {_SHARE_OF_RUN:.0%} of the job, {format_seconds(MOST_S)} at most"
        )
    return Sample(positions=tuple(positions.tolist()), allowed_s=allowed_s, reason="")


def fastest(seconds: Mapping[str, float], *, num_rows: int, dropped: Mapping[str, str]) -> EngineChoice:
    """brim's own engine, unless another was notably faster on the sample.

    seconds: of each engine that wrote it, brim's own among them. dropped: why others did not.
    """
    speeds = {kind: num_rows / taken_s for kind, taken_s in seconds.items()}
    best = max(speeds, key=speeds.__getitem__)
    kind = best if speeds[best] > _LEAST_GAIN * speeds[SLOTS] else SLOTS
    listed = ", ".join(f"{name} {speed:,.3g}" for name, speed in sorted(speeds.items(), key=lambda each: -each[1]))
    beside = "".join(f"; {name}: {reason}" for name, reason in dropped.items())
    return EngineChoice(kind=kind, reason=f"rows/s over {num_rows:,} rows: {listed}{beside}", rows_per_s=speeds)


def unmeasured(reason: str) -> EngineChoice:
    """brim's own engine: in the benchmark it is the fastest on CPUs, and rows that end early leave it at once."""
    return EngineChoice(kind=SLOTS, reason=f"the usual choice, not measured: {reason}")


def _middle(tokens: NDArray[np.int64], count: int) -> NDArray[np.intp]:
    """Positions of so many rows about the median."""
    order = np.argsort(tokens, kind="stable")
    start = (len(tokens) - count) // 2
    return np.sort(order[start : start + count])


def _none(reason: str) -> Sample:
    return Sample(positions=(), allowed_s=0.0, reason=reason)
