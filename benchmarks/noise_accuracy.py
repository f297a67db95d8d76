"""Measure how right measurements of the gradient's noise are, on a pool of rows for which the truth is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.subject import SEED
from brim.batching import NUM_GROUPS, NoiseMeasurement, NoiseScale

BATCH_ROWS = 64
_WARMUP_MEASUREMENTS = 50

Groups: TypeAlias = list[NDArray[np.intp]]  # positions in a batch
Estimator: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.int64], Groups], NoiseMeasurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Hold rows, with the inner products of their gradients."""

    lengths: NDArray[np.int64]  # tokens
    weights: NDArray[np.int64]  # supervised tokens
    products: NDArray[np.float64]  # [row, row] of the gradients of the summed losses

    @property
    def squared_gradient(self) -> float:
        """Return |G|² of the token-weighted mean over the pool."""
        return float(self.products.sum() / self.weights.sum() ** 2)

    @property
    def gradient_variance(self) -> float:
        """Return the variance of a drawn batch's gradient, times its rows; to first order in 1/rows."""
        return float(np.diag(self._noise_products).mean())

    @property
    def effective_dimensions(self) -> float:
        """Return (tr Σ)² / tr Σ²: as many directions of equal noise would make estimates as certain as they are."""
        return float(self.gradient_variance**2 / (self._noise_products**2).mean())

    @property
    def _noise_products(self) -> NDArray[np.float64]:
        """Return inner products [row, row] of what a row adds to a batch beyond its weight's part of G, times rows."""
        total = self.weights.sum()
        with_mean = np.outer(self.products.sum(1), self.weights) / total
        of_means = np.outer(self.weights, self.weights) * self.squared_gradient
        noise = self.products - with_mean - with_mean.T + of_means
        return np.asarray(noise / self.weights.mean() ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Hold a way to measure: means over many batches, over what is true of the pool."""

    way: str
    batch_rows: int
    squared_gradient: float
    gradient_variance: float
    noise_scale: float  # ratio of the means
    smoothed_quantiles: tuple[float, float, float]  # 5%, 50% and 95% of the averaged noise scale over a run
    within_factor_of_two: float  # of the averaged ones
    single_within_factor_of_two: float  # of single measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Say how rows are grouped, and what is made of the groups' norms."""

    name: str
    estimate: Estimator
    num_groups: int = NUM_GROUPS
    by_length: bool = False

    def groups(self, lengths: NDArray[np.int64]) -> Groups:
        order = np.argsort(-lengths, kind="stable") if self.by_length else np.arange(len(lengths))
        return np.array_split(order, min(self.num_groups, len(order)))


def _by_pairs(products: NDArray[np.float64], weights: NDArray[np.int64], groups: Groups) -> NoiseMeasurement:
    """Measure as brim does."""
    total = int(weights.sum())
    found = NoiseMeasurement.of(
        squared_sum=float(products.sum()) / total**2,
        squared_shares=[float(products[np.ix_(group, group)].sum()) / total**2 for group in groups],
        weights=[int(weights[group].sum()) for group in groups],
        num_rows=len(weights),
    )
    assert found is not None
    return found


def _by_one_covariance(products: NDArray[np.float64], weights: NDArray[np.int64], groups: Groups) -> NoiseMeasurement:
    """Measure as if all rows had one covariance, however many tokens they have; never negative."""
    total = weights.sum()
    of_sum = float(products.sum() / total**2)
    spread, share = -of_sum, -float((weights**2).sum() / total**2)
    for group in groups:
        weight = weights[group].sum()
        spread += float(products[np.ix_(group, group)].sum() / weight / total)
        share += float((weights[group] ** 2).sum() / weight / total)
    of_batch = spread / share * float((weights**2).sum() / total**2)
    return NoiseMeasurement(squared_gradient=of_sum - of_batch, gradient_variance=len(weights) * of_batch)


WAYS = (
    Way(name="8 random groups", estimate=_by_pairs),
    Way(name="each row by itself", estimate=_by_pairs, num_groups=BATCH_ROWS),
    Way(name="8 groups by length", estimate=_by_pairs, by_length=True),
    Way(name="8 random groups, one covariance", estimate=_by_one_covariance),
    Way(name="each row by itself, one covariance", estimate=_by_one_covariance, num_groups=BATCH_ROWS),
    Way(name="8 groups by length, one covariance", estimate=_by_one_covariance, by_length=True),
)


def accuracy(way: Way, pool: Pool, batch_rows: int, num_draws: int) -> Accuracy:
    """Compare measurements with what is true of the pool; all of them see the same batches."""
    found = list(_measurements(way, pool, batch_rows, num_draws))
    squared = float(np.mean([each.squared_gradient for each in found])) / pool.squared_gradient
    variance = float(np.mean([each.gradient_variance for each in found])) / pool.gradient_variance
    noise, smoothed = NoiseScale(), []
    for each in found:
        noise = noise.after(each)
        smoothed.append(np.inf if noise.rows is None else noise.rows)
    truth = pool.gradient_variance / pool.squared_gradient
    single = [each.gradient_variance / each.squared_gradient / truth for each in found]
    ratios = np.array(smoothed[_WARMUP_MEASUREMENTS:]) / truth
    low, middle, high = (round(float(q), 3) for q in np.quantile(ratios, [0.05, 0.5, 0.95], method="nearest"))
    return Accuracy(
        way=way.name,
        batch_rows=batch_rows,
        squared_gradient=round(squared, 4),
        gradient_variance=round(variance, 4),
        noise_scale=round(variance / squared, 4),
        smoothed_quantiles=(low, middle, high),
        within_factor_of_two=_near(ratios),
        single_within_factor_of_two=_near(np.array(single)),
    )


def _near(ratios: NDArray[np.float64]) -> float:
    return round(float(((ratios >= 0.5) & (ratios <= 2)).mean()), 4)


def _measurements(way: Way, pool: Pool, batch_rows: int, num_draws: int) -> Iterator[NoiseMeasurement]:
    random = np.random.default_rng(SEED)
    for _ in range(num_draws):
        rows = random.integers(0, len(pool.lengths), batch_rows)
        yield way.estimate(pool.products[np.ix_(rows, rows)], pool.weights[rows], way.groups(pool.lengths[rows]))
