"""Splits with too few rows to measure by."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np

from brim.data.advice.finding import Finding

_ENOUGH_ROWS = 30


def small_split(num_rows: Mapping[str, int]) -> list[Finding]:
    """Validation and test with a few rows. num_rows: of each split; none at all is told elsewhere.

    The uncertainty of a share of n rows is at most 0.98 / sqrt(n), at 95% confidence.
    """
    small = {name: num_rows[name] for name in ("validation", "test") if 0 < num_rows.get(name, 0) < _ENOUGH_ROWS}
    if not small:
        return []
    told = ", ".join(f"{name} has {count:,}" for name, count in small.items())
    uncertainty = min(0.98 / sqrt(min(small.values())), 1)
    return [
        Finding(
            kind="small_split",
            what=f"few rows to measure by: {told}",
            why=f"an accuracy from so few rows is uncertain by up to ±{uncertainty:.0%}",
            fix="give the split more rows (preprocessing.split)",
            rows=np.zeros(0, np.int64),
        )
    ]
