"""How long a micro-batch would take on a device that is not at hand: counted work, divided by catalogue figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brim.batching.surface import Surface
from brim.memory.device_speed import DeviceSpeed
from brim.memory.work import WorkCount
from brim.planning.roofline import BoundShares, roofline, shares
from brim.planning.work_law import Shape, WorkLaw, work_law

_LENGTHS = 5  # lines of a surface
_LEAST_TOKENS = 8  # of the first sample of a line; before it, a line to no tokens at all
_A_LINE = 24  # samples: neighbours differ by less than a factor of two


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of a micro-batch's forward and backward pass."""

    surface: Surface
    law: WorkLaw
    speed: DeviceSpeed

    def bound(self, shapes: Sequence[Shape]) -> BoundShares:
        """What these micro-batches, (rows, tokens of each), are bound by, together."""
        rows, lengths = np.array(shapes, dtype=np.float64).T
        return shares(roofline(self.law, self.speed, rows * lengths, lengths))

    def recomputed(self, shapes: Sequence[Shape]) -> float:
        """The share of their time that goes into computing activations anew."""
        rows, lengths = np.array(shapes, dtype=np.float64).T
        parts = (self.law, self.law.of("recompute"))
        total, again = (float(roofline(law, self.speed, rows * lengths, lengths).total_s.sum()) for law in parts)
        return min(again / total, 1.0)


def estimate(
    counts: Mapping[Shape, WorkCount], speed: DeviceSpeed, *, longest: int, shortest: int, most_rows: int
) -> TimeEstimate:
    """From the work of a few shapes, (rows, tokens of each): those that `shapes_to_count` asks for, and any others.

    longest, shortest: tokens of the rows that there are. most_rows: of a micro-batch.
    """
    law = work_law(counts)
    lengths = _spread(shortest, longest, _LENGTHS)
    most = max(most_rows * longest, 2 * _LEAST_TOKENS)
    tokens = _spread(_LEAST_TOKENS, most, _A_LINE)
    lines = [roofline(law, speed, tokens, length).total_s for length in lengths]
    return TimeEstimate(
        surface=Surface(
            base=float(roofline(law, speed, 0, shortest).total_s[0]),
            lengths=lengths,
            tokens=(tokens,) * len(lengths),
            values=tuple(tuple(np.maximum.accumulate(line).tolist()) for line in lines),
        ),
        law=law,
        speed=speed,
    )


def _spread(first: int, last: int, number: int) -> tuple[int, ...]:
    """Whole numbers from one to the other, in steps of about one factor."""
    steps = np.geomspace(first, max(last, first), number)
    return tuple(sorted({first, last, *(round(float(step)) for step in steps)})) if last > first else (first,)
