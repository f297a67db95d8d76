"""How lengths are spread, in a few bins with round edges."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

_MOST_BINS = 8
_WIDE_SPREAD = 8  # times the shortest length: beyond it, each bin is twice as wide as the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """How many rows have a length from `first` to `last`, both included."""

    first: int
    last: int
    num_rows: int


def histogram(lengths: npt.NDArray[np.int64]) -> tuple[Bin, ...]:
    """At most eight bins, without gaps, from the shortest to the longest; none for no lengths."""
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    starts = _doubling(shortest, longest) if longest > _WIDE_SPREAD * max(shortest, 1) else _even(shortest, longest)
    counts, _ = np.histogram(lengths, bins=[*starts, longest + 1])
    ends = [*(start - 1 for start in starts[1:]), longest]
    bins = zip(starts, ends, counts.tolist(), strict=True)
    return tuple(Bin(first=first, last=last, num_rows=num_rows) for first, last, num_rows in bins)


def _doubling(shortest: int, longest: int) -> list[int]:
    """… 129, 257, 513: starts of bins that end at powers of two; the first takes all that is shorter."""
    starts = [2**exponent + 1 for exponent in range(longest.bit_length()) if shortest < 2**exponent + 1 <= longest]
    return [shortest, *starts[1 - _MOST_BINS :]]


def _even(shortest: int, longest: int) -> list[int]:
    """Starts of equally wide bins, of the smallest of the widths 1, 2, 5, 10, 20, 50, … that make few enough."""
    widths = (digit * 10**exponent for exponent in count() for digit in (1, 2, 5))
    width = next(width for width in widths if longest // width - shortest // width < _MOST_BINS)
    return list(range(shortest // width * width, longest + 1, width))
