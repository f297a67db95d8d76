"""Put the rows of a step into the fewest packed micro-batches, each within its capacity, and even them out.

Without padding, what a step takes depends on how many micro-batches there are and on nothing else of its cut: tokens
and attention within rows are the same in any. So the fewest are the fastest, and equal ones have the lowest peak.

A packed micro-batch costs what padded rows cost that have as many tokens, all as long as its longest row for the peak,
or as the rows' mean weighted by their tokens for the time: attention's work goes by the sum of squared lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from brim.batching.costs import Costs

MULTIPLE = 64  # tokens to which a packed micro-batch is filled up: products are fast, and there are few shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCosts:
    """Predict packed micro-batches by what padded ones cost, and say what fits."""

    costs: Costs  # filled up to MULTIPLE tokens
    cap_bytes: int

    def capacities(self, longest: NDArray[np.int64], *, most: int) -> NDArray[np.int64]:
        """Return the tokens, some more than `most` at most, that fit with each of these as the longest; 0: none do."""
        found = self.costs.tokens_that_fit(longest, cap_bytes=self.cap_bytes, most=most)
        wanted = found if self.costs.most_tokens is None else np.maximum(self.costs.most_tokens, longest)
        return np.where(found < longest, 0, np.minimum(found, wanted))

    def peak_bytes(self, tokens: NDArray[np.int64], longest: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the predicted bytes of micro-batches of so many tokens."""
        return np.ceil(self.costs.peak_bytes(tokens / longest, longest)).astype(np.int64)

    def seconds(self, tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the predicted seconds. squares: sums of squared lengths."""
        mean = squares / tokens
        return self.costs.seconds(tokens / mean, mean)

    def as_equal_rows(
        self, tokens: NDArray[np.int64], longest: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and their common length, about the longest, that fill a micro-batch up to as many tokens."""
        filled = -(-tokens // self.costs.multiple) * self.costs.multiple
        many = np.stack([-(-tokens // longest), filled // longest])  # a few rows: of equal length; many: of the longest
        length = np.minimum(filled // many, longest)
        best = np.where(many[0] * length[0] >= many[1] * length[1], 0, 1)[None]
        return np.take_along_axis(many, best, 0)[0], np.take_along_axis(length, best, 0)[0]


_MOST_NODES = 2000  # of the exact search, about a millisecond


_MOST_TRIES = 8  # numbers of bins: the fullest-first way is rarely off by more than one


def fewest_bins(lengths: Sequence[int], capacities: Sequence[int], *, ranks: int = 1) -> list[list[int]]:
    """Return the positions of the rows of each bin, in order; for so many ranks a multiple of them, or each row alone.

    Among ranks the fewest bins would leave some idle while others take their last, and small ones are dealt evenly.

    lengths: tokens of at least one row, the longest first. capacities: the tokens of a bin whose longest row it is; at
    least the row's own. A row for which it is no more is joined by none: so one goes alone that is over the cap.
    The number of bins is the least that one of three ways finds: the longest rows first, each into the emptiest bin,
    which is the most even, or into the fullest that takes it; and, where that may not be the least, a search through
    all ways that ends after some thousand tries.
    """
    found = _fewest(lengths, capacities)
    number = min(-(-len(found) // ranks) * ranks, len(lengths))
    more = None if number == len(found) else _emptiest(lengths, capacities, number)
    return found if more is None else more


def _fewest(lengths: Sequence[int], capacities: Sequence[int]) -> list[list[int]]:
    filled = _fullest(lengths, capacities)
    least = max(-(-sum(lengths) // max(capacities)), len(filled) - _MOST_TRIES)
    for number in range(least, len(filled) + 1):
        found = _emptiest(lengths, capacities, number)
        if found is None and number == len(filled) - 1:
            found = _searched(lengths, capacities, number)
        if found is not None:
            return found
    return filled


def _emptiest(lengths: Sequence[int], capacities: Sequence[int], number: int) -> list[list[int]] | None:
    """Put each row into the emptiest of so many bins that are not full; None where one overflows."""
    bins = [[position] for position in range(number)]
    loads = [(lengths[position], position) for position in range(number) if lengths[position] < capacities[position]]
    if not loads:
        return None
    heapify(loads)
    for position in range(number, len(lengths)):
        load, which = loads[0]
        load += lengths[position]
        if load > capacities[which]:
            return None
        bins[which].append(position)
        heapreplace(loads, (load, which))
    return bins


def _fullest(lengths: Sequence[int], capacities: Sequence[int]) -> list[list[int]]:
    """Put each row into the fullest bin that takes it, or into one of its own (best fit decreasing)."""
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # tokens that a bin still takes, ascending
    for position, length in enumerate(lengths):
        at = bisect_left(left, (length, -1))
        if at == len(left):
            insort(left, (capacities[position] - length, len(bins)))
            bins.append([position])
        else:
            room, which = left.pop(at)
            bins[which].append(position)
            insort(left, (room - length, which))
    return bins


def _searched(lengths: Sequence[int], capacities: Sequence[int], number: int) -> list[list[int]] | None:
    """Search for a way into so many bins, depth first; None where there is none, or none was found in time."""
    bins: list[list[int]] = []
    room: list[int] = []
    nodes = 0

    def place(position: int) -> bool:
        nonlocal nodes
        nodes += 1
        if position == len(lengths):
            return True
        length, tried = lengths[position], set()
        for which in sorted(range(len(bins)), key=room.__getitem__):
            if room[which] < length or room[which] in tried or nodes > _MOST_NODES:
                continue
            tried.add(room[which])
            bins[which].append(position)
            room[which] -= length
            if place(position + 1):
                return True
            bins[which].pop()
            room[which] += length
        if len(bins) == number or nodes > _MOST_NODES:
            return False
        bins.append([position])
        room.append(capacities[position] - length)
        if place(position + 1):
            return True
        bins.pop()
        room.pop()
        return False

    return bins if len(lengths) < _MOST_DEEP and place(0) else None


_MOST_DEEP = 500  # rows: each takes a level of the search
