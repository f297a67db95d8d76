"""Whether steps leave memory behind: a decision over live bytes, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

WARM_UP_STEPS = 1  # the optimizer's state and the caches of kernels are born in the first
LEAST_RISES = 3  # in a row: fewer happen by chance where lengths vary


def rise_per_step(end_bytes: Sequence[int], *, tolerance_bytes: int) -> int | None:
    """The median rise where each step after the first ended above the one before it; None where one did not.

    end_bytes: live after each step, equal in shape. tolerance_bytes: what counts as no rise, such as an allocator's
    rounding.
    """
    counted = end_bytes[WARM_UP_STEPS:]
    rises = [after - before for before, after in pairwise(counted)]
    if len(rises) < LEAST_RISES or min(rises) <= tolerance_bytes:
        return None
    return round(median(rises))
