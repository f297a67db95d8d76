"""Where to cut rows that are in order of length: the borders of the cheapest micro-batches, by dynamic programming."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from brim.batching.costs import Costs
from brim.batching.widths import rows_that_fit

# Beyond this many rows their pairs are too many to be looked at for each step: 512 take about 15 ms on one core.
MOST_ROWS_FOR_ALL_PAIRS = 512


class RowTooLongError(Exception):
    """A row is over the cap alone."""

    def __init__(self, *, position: int, length: int, peak_bytes: int, cap_bytes: int) -> None:
        super().__init__(f"row {position} of {length} tokens takes {peak_bytes} bytes alone, the cap is {cap_bytes}")
        self.position = position  # among the rows to be cut
        self.length = length
        self.peak_bytes = peak_bytes
        self.cap_bytes = cap_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a micro-batch may take, and what makes one better than another."""

    costs: Costs
    cap_bytes: int
    most_rows: int | None = None
    largest: bool = False  # fewest micro-batches, then least padding; else least predicted time
    lone_rows_may_exceed: bool = False

    def widths(self, lengths: NDArray[np.int64], *, most: int) -> NDArray[np.int64]:
        """The most rows of each length; 0: not even one."""
        most = min(most, self.most_rows or most)
        widths = rows_that_fit(self.costs, lengths, cap_bytes=self.cap_bytes, most=most)
        return np.maximum(widths, 1) if self.lone_rows_may_exceed else widths

    def prices(self, rows: NDArray[np.float64], length: NDArray[np.int64], *, weight: int) -> NDArray[np.float64]:
        """What a micro-batch costs; shapes broadcast. weight: more tokens than the padding of any cut.

        Whole numbers below 2**53, and so exact, where the largest are asked for.
        """
        return weight + rows * length if self.largest else self.costs.seconds(rows, length)


def borders(terms: Terms, lengths: NDArray[np.int64], positions: NDArray[np.intp]) -> list[int]:
    """Where each micro-batch begins, and the end.

    lengths: tokens of at least one row, the longest first. positions: what an error calls these rows.
    Up to MOST_ROWS_FOR_ALL_PAIRS rows the cheapest cut whatever the prices are; beyond them under the Monge
    condition, which a time of a + b·N + c·N·T (N padded tokens, T the longest row) with a floor meets, and so does
    the count of micro-batches.

    Raises RowTooLongError.
    """
    num_rows = len(lengths)
    weight = num_rows * int(lengths[0]) + 1
    distinct, kinds = np.unique(lengths, return_inverse=True)
    widths = terms.widths(distinct, most=num_rows)
    require_each_fits(terms, lengths, positions, widths[kinds])
    if num_rows <= MOST_ROWS_FOR_ALL_PAIRS:
        table = price_table(terms, distinct, widths, weight=weight)
        begins = cheapest_by_all_pairs(table, kinds[None])[0].tolist()
    else:
        widths = np.minimum.accumulate(widths)  # of the shortest first: a longer row has no more room
        begins = cheapest_by_queue(widths[kinds].tolist(), line_prices(terms, lengths, weight=weight))
    ends = [num_rows]
    while ends[-1]:
        ends.append(begins[ends[-1]])
    return ends[::-1]


def require_each_fits(
    terms: Terms, lengths: NDArray[np.int64], positions: NDArray[np.intp], widths: NDArray[np.int64]
) -> None:
    """Raises RowTooLongError for the first row of width 0."""
    if widths.all():
        return
    worst = int(np.argmin(widths))
    length = int(lengths[worst])
    raise RowTooLongError(
        position=int(positions[worst]),
        length=length,
        peak_bytes=int(np.ceil(terms.costs.peak_bytes(1, length))),
        cap_bytes=terms.cap_bytes,
    )


def price_table(
    terms: Terms, lengths: NDArray[np.int64], widths: NDArray[np.int64], *, weight: int
) -> NDArray[np.float64]:
    """[length, rows - 1]: the price of a micro-batch; infinite where it is wider than it may be."""
    rows = np.arange(1, int(widths.max()) + 1)
    table = terms.prices(rows.astype(np.float64), lengths[:, None], weight=weight)
    table[rows > widths[:, None]] = inf
    return table


def cheapest_by_all_pairs(table: NDArray[np.float64], kinds: NDArray[np.intp]) -> NDArray[np.int32]:
    """[B, n + 1]: for B batches, where the last micro-batch of the cheapest cut of the first j rows begins.

    kinds: [B, n], each row's line of the table. Exact whatever the prices are. O(n · widest) a batch. Of cuts that
    cost the same, the one whose last micro-batch is the largest.
    """
    num_batches, num_rows = kinds.shape
    best = np.full((num_batches, num_rows + 1), inf)
    best[:, 0] = 0.0
    begins = np.zeros((num_batches, num_rows + 1), dtype=np.int32)
    for begin in range(num_rows):
        width = min(table.shape[1], num_rows - begin)
        offers = table[kinds[:, begin], :width]
        offers += best[:, begin, None]
        reached = slice(begin + 1, begin + 1 + width)
        is_better = offers < best[:, reached]
        np.copyto(best[:, reached], offers, where=is_better)
        np.copyto(begins[:, reached], np.int32(begin), where=is_better)
    return begins


def cheapest_by_queue(widths: Sequence[int], price: Callable[[int, int], float]) -> list[int]:
    """Where the last micro-batch of the cheapest cut of the first j rows begins, for j from 0 to n.

    price(begin, rows): of a micro-batch. Exact where widths never fall and one more row never costs less in a
    micro-batch that begins earlier (the Monge condition): a beginning that has become the better of two stays so, and
    the queue holds those that will be the best in turn. O(n log n).
    """
    num_rows = len(widths)
    best, begins = [0.0], [0]

    def offer(begin: int, end: int) -> float:
        return best[begin] + price(begin, end - begin) if end - begin <= widths[begin] else inf

    queue = deque([(0, 1)])  # a beginning, and the first end for which it is the best
    for end in range(1, num_rows + 1):
        while len(queue) > 1 and queue[1][1] <= end:
            queue.popleft()
        begins.append(queue[0][0])
        best.append(offer(queue[0][0], end))
        if end < num_rows:
            _add_beginning(queue, end, min(num_rows, end + widths[end]), offer)
    return begins


def _add_beginning(queue: deque[tuple[int, int]], begin: int, reach: int, offer: Callable[[int, int], float]) -> None:
    """One more beginning for the ends up to `reach`; those that it is better than from their first end on leave."""
    while queue:
        last, low = queue[-1][0], max(queue[-1][1], begin + 1)
        if not offer(begin, low) < offer(last, low):
            break
        queue.pop()
    else:
        queue.append((begin, begin + 1))
        return
    high = reach + 1  # not better at low; better at high, or out of reach
    while high - low > 1:
        middle = (low + high) // 2
        if offer(begin, middle) < offer(last, middle):
            high = middle
        else:
            low = middle
    if high <= reach:
        queue.append((begin, high))


def line_prices(terms: Terms, lengths: NDArray[np.int64], *, weight: int) -> Callable[[int, int], float]:
    """price(begin, rows) of rows in order: straight pieces between the kinks, read without an array."""
    tokens = lengths.tolist()
    if terms.largest:
        return lambda begin, rows: weight + rows * tokens[begin]
    distinct, kinds = np.unique(lengths, return_inverse=True)
    kinks = np.concatenate([[0.0], terms.costs.time.kinks])
    ends = np.append(kinks, 2.0 * kinks[-1] + 1.0)
    values = terms.prices(ends / distinct[:, None], distinct[:, None], weight=weight)
    slopes = (np.diff(values, axis=1) / np.diff(ends)).tolist()
    starts, values, line_of = kinks.tolist(), values.tolist(), kinds.tolist()

    def price(begin: int, rows: int) -> float:
        num_tokens = rows * tokens[begin]
        piece = bisect_right(starts, num_tokens) - 1
        line = line_of[begin]
        return values[line][piece] + slopes[line][piece] * (num_tokens - starts[piece])  # type: ignore[no-any-return]

    return price
