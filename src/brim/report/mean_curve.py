"""The curves of several seeds as one: mean, lowest and highest at each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.train.run_figures import Curve

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanCurve:
    """[P] each, in the order of tokens."""

    tokens: Floats
    mean: Floats
    low: Floats
    high: Floats


def of_training(curves: Sequence[Curve], *, num_bins: int) -> MeanCurve:
    """Of training losses: means over supervised tokens in stretches of equally many tokens; each at its middle.

    A stretch in which a run has no point (its steps are longer) takes the mean of the others.
    """
    by_run = np.full((len(curves), num_bins), np.nan)
    for row, curve in enumerate(curves):
        by_run[row] = _in_bins(curve, num_bins)
    ends = np.array([curve.tokens[-1] for curve in curves], dtype=np.float64)
    middles = (np.arange(num_bins) + 0.5) / num_bins * ends.mean()
    return _of(middles, by_run)


def of_evaluations(curves: Sequence[Curve]) -> MeanCurve:
    """Of evaluations: at the first run's places, between which the others' are drawn straight where they differ."""
    places = np.array(curves[0].tokens, dtype=np.float64)
    by_run = np.array([np.interp(places, curve.tokens, curve.loss) for curve in curves])
    if all(len(curve.tokens) == len(places) for curve in curves):
        by_run = np.array([curve.loss for curve in curves])
        places = np.array([curve.tokens for curve in curves], dtype=np.float64).mean(axis=0)
    return _of(places, by_run)


def _in_bins(curve: Curve, num_bins: int) -> Floats:
    """[bins]; NaN where there is no point."""
    ends = np.array(curve.tokens, dtype=np.float64)
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
    bins = np.minimum((middles / ends[-1] * num_bins).astype(np.intp), num_bins - 1)
    weights = np.array(curve.weights, dtype=np.float64)
    total = np.bincount(bins, weights=weights, minlength=num_bins)
    losses = np.bincount(bins, weights=weights * np.array(curve.loss), minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return np.asarray(losses / total)


def _of(places: Floats, by_run: Floats) -> MeanCurve:
    """by_run: [runs, P]."""
    there = ~np.isnan(by_run).all(axis=0)
    values = by_run[:, there]
    return MeanCurve(
        tokens=places[there],
        mean=np.nanmean(values, axis=0),
        low=np.nanmin(values, axis=0),
        high=np.nanmax(values, axis=0),
    )
