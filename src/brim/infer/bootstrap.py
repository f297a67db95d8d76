"""How sure a figure is: 95% intervals by drawing rows with replacement (percentile bootstrap, Efron 1979)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_NUM_RESAMPLES = 2000
_DRAWS_AT_ONCE = 2_000_000  # rows; bounds the memory on large data

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95% confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of rows, and what it would be of others like them."""

    value: float
    of: Callable[[Floats], Floats]  # [B], of rows that are there so many times each: [B, N]


def ratio(numerator: NDArray[np.generic], denominator: NDArray[np.generic] | None = None) -> Measure:
    """Sum of the one over that of the other, [N] each; None: over the rows, which makes it a mean."""
    above = np.asarray(numerator, dtype=np.float64)
    below = np.ones(len(above)) if denominator is None else np.asarray(denominator, dtype=np.float64)

    def of(counts: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):  # no token in the rows that were drawn, or no number
            return np.asarray((counts @ above) / (counts @ below))

    return Measure(value=float(above.sum() / below.sum()), of=of)


def intervals(measures: Mapping[str, Measure], num_rows: int, *, seed: int = 0) -> dict[str, Interval]:
    """Of each measure; all of the same draws of rows."""
    drawn = _resampled(list(measures.values()), num_rows, seed)
    return {name: _interval(values) for name, values in zip(measures, drawn, strict=True)}


def paired_intervals(
    ours: Mapping[str, Measure], theirs: Mapping[str, Measure], num_rows: int, *, seed: int = 0
) -> dict[str, Interval]:
    """Of the differences ours - theirs of measures that both have, on the same rows in the same order.

    Both are taken of the same draws: what makes a row hard for either model leaves the difference.
    """
    names = [name for name in ours if name in theirs]
    drawn = _resampled([each[name] for each in (ours, theirs) for name in names], num_rows, seed)
    with np.errstate(invalid="ignore"):
        differences = drawn[: len(names)] - drawn[len(names) :]
    return {name: _interval(values) for name, values in zip(names, differences, strict=True)}


def ratio_interval(numerator: NDArray[np.generic], denominator: NDArray[np.generic], *, seed: int = 0) -> Interval:
    """The interval of sum(numerator) / sum(denominator)."""
    return intervals({"ratio": ratio(numerator, denominator)}, len(numerator), seed=seed)["ratio"]


def _resampled(measures: Sequence[Measure], num_rows: int, seed: int) -> Floats:
    """[measures, resamples]. The draws do not depend on how many are made at once."""
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
    # Between infinities there is no number.
    low, high = np.quantile(values, [0.025, 0.975], method="nearest" if np.isinf(values).any() else "linear")
    return Interval(low=float(low), high=float(high))
