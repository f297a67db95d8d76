"""Compute 95% confidence intervals.

Means of a few repetitions get intervals by Student's t. Metrics of rows get intervals by drawing rows with
replacement (percentile bootstrap, Efron 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_COVERED = 0.95


_HALVINGS = 100  # of a right angle: down to the last bit of a float


@lru_cache(maxsize=64)
def t_quantile(degrees: int) -> float:
    """Return the t that |T| exceeds in 5% of all cases, for this many degrees of freedom, at least 1."""
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
    """Return P(|T| < √degrees · tan(angle)), by finite sums (Abramowitz, Stegun: 26.7.3 for odd, 26.7.4 for even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for number in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


_NUM_RESAMPLES = 2000


_DRAWS_AT_ONCE = 2_000_000  # rows; bounds the memory on large data


Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Hold a 95% confidence interval."""

    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Interval | None:
        """Return mean ± t · s / √n, for normal values; None for fewer than two, or where one is not finite."""
        number = len(values)
        if number < 2 or not all(map(math.isfinite, values)):
            return None
        mean = math.fsum(values) / number
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
        half = t_quantile(number - 1) * deviation / math.sqrt(number)
        return cls(low=mean - half, high=mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Hold a figure of rows, and a function that computes it for rows that are drawn from them."""

    value: float
    of: Callable[[Floats], Floats]  # [B, N], how many times each row was drawn -> [B]

    @classmethod
    def ratio(cls, numerator: NDArray[np.generic], denominator: NDArray[np.generic] | None = None) -> Measure:
        """Divide the sum of the one by that of the other, [N] each; None: by the number of rows, which gives a mean."""
        above = np.asarray(numerator, dtype=np.float64)
        below = np.ones(len(above)) if denominator is None else np.asarray(denominator, dtype=np.float64)

        def of(counts: Floats) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):  # no token in the rows that were drawn, or NaN
                return np.asarray((counts @ above) / (counts @ below))

        return cls(value=float(above.sum() / below.sum()), of=of)


def intervals(measures: Mapping[str, Measure], num_rows: int, *, seed: int = 0) -> dict[str, Interval]:
    """Return the interval of each measure; all use the same draws of rows."""
    drawn = _resampled(list(measures.values()), num_rows, seed)
    return {name: _interval(values) for name, values in zip(measures, drawn, strict=True)}


def paired_intervals(
    ours: Mapping[str, Measure], theirs: Mapping[str, Measure], num_rows: int, *, seed: int = 0
) -> dict[str, Interval]:
    """Return intervals of the differences ours - theirs of measures that both have, on the same rows in the same order.

    Both use the same draws, so that what makes a row hard for either model cancels.
    """
    names = [name for name in ours if name in theirs]
    drawn = _resampled([each[name] for each in (ours, theirs) for name in names], num_rows, seed)
    with np.errstate(invalid="ignore"):
        differences = drawn[: len(names)] - drawn[len(names) :]
    return {name: _interval(values) for name, values in zip(names, differences, strict=True)}


def _resampled(measures: Sequence[Measure], num_rows: int, seed: int) -> Floats:
    """Return [measures, resamples]. The draws do not depend on how many are made at once."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // num_rows)
    parts = []
    for done in range(0, _NUM_RESAMPLES, at_once):
        number = min(at_once, _NUM_RESAMPLES - done)
        drawn = generator.integers(0, num_rows, size=(number, num_rows))
        drawn += num_rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * num_rows).reshape(number, num_rows).astype(np.float64)
        parts.append(np.stack([measure.of(counts) for measure in measures]))
    return np.concatenate(parts, axis=1)


def _interval(values: Floats) -> Interval:
    # Between infinities, interpolation would give NaN.
    low, high = np.quantile(values, [0.025, 0.975], method="nearest" if np.isinf(values).any() else "linear")
    return Interval(low=float(low), high=float(high))
