"""Curves of several configurations without what a seed makes harder, or easier, for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from brim.train.run_figures import Curve


def levelled(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, list[Curve]]:
    """curves: by configuration and seed. Each seed's curves are moved, all by the same, to the mean level of the seeds.

    A seed's split and sample can differ more from those of another seed than any two configurations do. Differences are
    paired by seed, and so are bands around curves that have been moved: the differences between configurations stay as
    they are (Cousineau 2005, Tutorials in Quantitative Methods for Psychology 1(1)). Seeds that not all configurations
    have, or in which one came to no number, are left where they are.
    """
    common = set.intersection(*(set(of_seeds) for of_seeds in curves.values())) if curves else set()
    levels = {seed: float(np.mean([_level(of_seeds[seed]) for of_seeds in curves.values()])) for seed in common}
    levels = {seed: level for seed, level in levels.items() if math.isfinite(level)}
    middle = float(np.mean(list(levels.values()))) if levels else 0.0
    return {
        name: [_moved(curve, middle - levels.get(seed, middle)) for seed, curve in of_seeds.items()]
        for name, of_seeds in curves.items()
    }


def _level(curve: Curve) -> float:
    return float(np.average(curve.loss, weights=curve.weights))


def _moved(curve: Curve, by: float) -> Curve:
    return replace(curve, loss=tuple(loss + by for loss in curve.loss))
