"""How sure a mean of a few repetitions is: 95% intervals by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from brim.infer.bootstrap import Interval

_COVERED = 0.95
_HALVINGS = 100  # of a right angle: down to the last bit of a float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """mean ± t · s / √n, for values that scatter normally; None for fewer than two, or where one is no number."""
    number = len(values)
    if number < 2 or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / number
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
    half = t_quantile(number - 1) * deviation / math.sqrt(number)
    return Interval(low=mean - half, high=mean + half)


@lru_cache(maxsize=64)
def t_quantile(degrees: int) -> float:
    """The t that |T| exceeds in 5% of all cases, for this many degrees of freedom, of which there is at least one."""
    assert degrees > 0, "one value has no scatter"
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < _COVERED:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(angle: float, degrees: int) -> float:
    """P(|T| < √degrees · tan(angle)): the finite sums of Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for number in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
