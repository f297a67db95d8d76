"""Which shapes of a micro-batch are worth timing before a run, and whether any is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs
from brim.planning.work_law import Shape
from brim.units import format_seconds

MOST_S = 30.0
_SHARE_OF_RUN = 0.02
CALLS = 3  # of each shape; the first one warms up: caches of primitives, choices of kernels, the allocator
_LEAST_SHAPES = 4  # a floor, a slope by tokens, one by length, and one to see whether the slope rises


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What to time. Without shapes, `reason` says why not, and the estimate stays."""

    shapes: tuple[Shape, ...]  # (rows, tokens), the ones that tell most first
    allowed_s: float
    reason: str


def shapes_to_time(
    lengths: ArrayLike, *, costs: Costs, cap_bytes: int, most_rows: int, run_s: float, most_s: float = MOST_S
) -> Timing:
    """Shapes that a run over rows of these lengths would use, all under the cap, and the seconds that they may take.

    Their lengths are those of rows that there are. costs.time: an estimate, by which the first shapes are afforded.
    run_s: the run's estimated seconds, of which a small share may go into timing.
    """
    allowed_s = min(_SHARE_OF_RUN * run_s, most_s)
    shapes = [
        (rows, length)
        for rows, length in _ladder(np.asarray(lengths, dtype=np.int64), most_rows)
        if costs.peak_bytes(rows, length) <= cap_bytes
    ]
    needed_s = CALLS * sum(float(costs.seconds(rows, length)) for rows, length in shapes[:_LEAST_SHAPES])
    if len(shapes) < _LEAST_SHAPES:
        return _none(allowed_s, f"only {len(shapes)} of the shapes that tell something fit under the cap")
    if needed_s > allowed_s:
        return _none(
            allowed_s,
            f"timing takes about {format_seconds(needed_s)}, more than {format_seconds(allowed_s)}: "
            f"{_SHARE_OF_RUN:.0%} of the run, {format_seconds(most_s)} at most",
        )
    return Timing(shapes=tuple(shapes), allowed_s=allowed_s, reason=f"{format_seconds(allowed_s)} at most")


def _ladder(lengths: NDArray[np.int64], most_rows: int) -> list[Shape]:
    """One row of short and of long length, as many tokens of short rows as of the long one, then ever more tokens.

    The first four of them tell a floor, N, N·T and a rising slope apart, and all first ones do.
    """
    short, middle, long = (int(np.percentile(lengths, q, method="inverted_cdf")) for q in (10, 50, 90))
    alike = min(max(long // short, 2), most_rows)
    first = [(1, short), (alike, short), (1, long), (min(2 * alike, most_rows), short)]
    doubling = [2**power for power in range(most_rows.bit_length())]
    further = [(rows, length) for rows in doubling for length in (middle, long)]
    further.sort(key=lambda shape: shape[0] * shape[1])
    return list(dict.fromkeys([*first, *further]))


def _none(allowed_s: float, reason: str) -> Timing:
    return Timing(shapes=(), allowed_s=allowed_s, reason=f"not measured: {reason}")
