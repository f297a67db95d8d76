"""What would make a step faster, given what it is bound by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.planning.time_estimate import TimeEstimate
from brim.planning.work_law import Shape

_WORTH_SAYING = 0.02


def time_advice(estimate: TimeEstimate, shapes: Sequence[Shape]) -> tuple[str, ...]:
    """Sentences for people. shapes: the micro-batches of typical steps, (rows, tokens of each)."""
    shares = estimate.bound(shapes)
    less = less_when_doubled(estimate, shapes)
    doubled = "micro-batches of twice the rows would "
    doubled += f"take {less:.0%} less time a token" if less >= _WORTH_SAYING else "not make it faster"
    if shares.bound_by == "arithmetic":
        said = (
            f"a step is bound by arithmetic ({shares.arithmetic:.0%} of its time): {doubled}, and 4-bit weights save "
            "memory, not time"
        )
    elif shares.bound_by == "memory traffic":
        said = (
            f"a step is bound by memory traffic ({shares.memory_traffic:.0%} of its time): {doubled}; 4-bit weights "
            "alone save none, since each product writes them out in half precision first"
        )
    else:
        said = (
            f"a step is bound by the host, which starts kernels ({shares.launches:.0%} of its time): {doubled}; a "
            "device that computes faster would not help"
        )
    anew = estimate.recomputed(shapes)
    if anew < _WORTH_SAYING:
        return (said,)
    return said, f"activation checkpointing computes {anew:.0%} of the time anew: memory that is free goes there first"


def less_when_doubled(estimate: TimeEstimate, shapes: Sequence[Shape]) -> float:
    """The share of the time a token that goes away with micro-batches of twice the rows."""
    rows, lengths = np.array(shapes, dtype=np.float64).T
    surface = estimate.surface
    return max(0.0, 1.0 - float(surface(2 * rows, lengths).sum()) / (2 * float(surface(rows, lengths).sum())))
