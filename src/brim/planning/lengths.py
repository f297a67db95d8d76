"""How long the rows of a data set are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Tokens of the rows."""

    num_rows: int
    num_tokens: int
    shortest: int
    median: int
    p90: int
    p99: int
    longest: int
    histogram: tuple[tuple[int, int], ...]  # (longest length of the bin, rows), bins doubling in length


def summarize_lengths(lengths: ArrayLike) -> LengthSummary:
    """lengths: tokens of each of at least one row."""
    tokens = np.asarray(lengths, dtype=np.int64)
    assert len(tokens), "there is no summary of no rows"
    p50, p90, p99 = (int(np.percentile(tokens, share, method="inverted_cdf")) for share in (50, 90, 99))
    bins = np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    return LengthSummary(
        num_rows=len(tokens),
        num_tokens=int(tokens.sum()),
        shortest=int(tokens.min()),
        median=p50,
        p90=p90,
        p99=p99,
        longest=int(tokens.max()),
        histogram=tuple((int(2**number), int(np.sum(bins == number))) for number in range(bins.min(), bins.max() + 1)),
    )
