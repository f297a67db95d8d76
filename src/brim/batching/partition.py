"""Partition rows in order of length into the cheapest micro-batches, by dynamic programming.

What all effective batches of a data set cost once partitioned is summed in seconds for a million rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.bins import PackedCosts, fewest_bins
from brim.batching.costs import Costs

_ENTRIES_AT_ONCE = 1 << 18  # of the table of a block of batches: 2 MiB stay in a core's cache
_ENTRIES_OF_PRICES = 1 << 24  # 128 MiB

# As many as one core looks at in one or two seconds, since a plan has several candidates; evenly chosen steps stand
# for the rest.
_MOST_PAIRS = 1 << 29
_MOST_ROWS_IN_QUEUES = 1 << 17
_MOST_SHAPES = 16
_Shapes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows and padded length of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Describe micro-batches that are alike to the device."""

    rows: int
    padded_length: int  # tokens
    peak_bytes: int  # predicted
    seconds: float  # predicted, of one of them
    count: int  # among the steps that were looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sum up the micro-batches of all steps; extrapolated where fewer steps were looked at."""

    num_steps: int
    num_micro_batches: int
    seconds: float  # of forward and backward passes
    padded_tokens: int
    real_tokens: int
    widest: Shape  # the one with the highest peak
    shapes: tuple[Shape, ...]  # the widest, and those that no other exceeds in rows and tokens; at most 16, by peak


def cut_totals(
    lengths: ArrayLike,
    batch_size: int,
    *,
    costs: Costs,
    cap_bytes: int,
    largest: bool = False,
    lone_rows_may_exceed: bool = False,
    fixed_rows: int | None = None,
) -> Totals:
    """Add up the micro-batches of `by_costs(…).cut`, effective batch by effective batch; the last may be smaller.

    lengths: tokens of each of at least one row, in the order in which they are consumed. fixed_rows: of `cut_by_rows`
    with so many rows instead, whatever the cap.
    O(n · widest micro-batch) up to MOST_ROWS_FOR_ALL_PAIRS rows a batch, for many batches at a time; beyond them
    O(n log n), one after the other.

    Raises RowTooLongError for the longest row that is over the cap alone.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    batches, rest = _sorted_batches(tokens, batch_size)
    if fixed_rows is not None and not costs.is_packed:
        num_steps = [len(batches), len(rest)]
        return _totals([_by_rows(each, fixed_rows) for each in (batches, rest)], num_steps, num_steps, tokens, costs)
    terms = Terms(costs=costs, cap_bytes=cap_bytes, largest=largest, lone_rows_may_exceed=lone_rows_may_exceed)
    if costs.is_packed:
        return _packed_totals(terms, tokens, batches, rest, fixed_rows=fixed_rows)
    distinct = np.unique(tokens)
    _require_each_fits(terms, tokens, distinct[terms.widths(distinct, most=1) == 0])
    looked_at = _evenly_chosen(batches)
    cut_up = [_cut_all(terms, looked_at), _cut_all(terms, rest)]
    return _totals(cut_up, [len(looked_at), len(rest)], [len(batches), len(rest)], tokens, costs)


def _sorted_batches(tokens: NDArray[np.int64], batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the full effective batches [B, n] and the last one [0 or 1, fewer], each with its longest row first."""
    num_full = len(tokens) // batch_size
    full = tokens[: num_full * batch_size].reshape(num_full, batch_size)
    rest = tokens[num_full * batch_size :]
    return -np.sort(-full, axis=1), -np.sort(-rest[None], axis=1)[: len(rest)]


def _evenly_chosen(batches: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return as many batches [B, n] as can be looked at in the time that there is."""
    size = batches.shape[1]
    by_pairs = size <= MOST_ROWS_FOR_ALL_PAIRS
    most = _MOST_PAIRS // size**2 if by_pairs else max(1, _MOST_ROWS_IN_QUEUES // size)
    return batches if len(batches) <= most else batches[np.arange(most) * len(batches) // most]


def _require_each_fits(terms: Terms, tokens: NDArray[np.int64], too_long: NDArray[np.int64]) -> None:
    """Raise RowTooLongError where there are lengths, ascending, that are over the cap alone."""
    if len(too_long):
        raise RowTooLongError(
            position=int(np.argmax(tokens == too_long[-1])),
            length=int(too_long[-1]),
            peak_bytes=int(np.ceil(terms.costs.peak_bytes(1, too_long[-1]))),
            cap_bytes=terms.cap_bytes,
        )


def _cut_all(terms: Terms, batches: NDArray[np.int64]) -> _Shapes:
    """Return the micro-batches of batches [B, n], in each of which the longest row is first."""
    if batches.size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    num_rows = batches.shape[1]
    one_by_one = num_rows > MOST_ROWS_FOR_ALL_PAIRS
    return _joined(_by_borders(terms, batches) if one_by_one else _by_all_pairs(terms, batches))


def _by_borders(terms: Terms, batches: NDArray[np.int64]) -> Iterator[_Shapes]:
    for lengths in batches:
        bounds = np.array(borders(terms, lengths)[0])
        yield np.diff(bounds), lengths[bounds[:-1]]


def _by_all_pairs(terms: Terms, batches: NDArray[np.int64]) -> Iterator[_Shapes]:
    num_rows = batches.shape[1]
    distinct, kinds = np.unique(batches, return_inverse=True)
    kinds = kinds.reshape(batches.shape)
    widths = terms.widths(distinct, most=num_rows)
    weight = num_rows * int(distinct[-1]) + 1
    fits_at_once = len(distinct) * int(widths.max()) <= _ENTRIES_OF_PRICES
    whole = price_table(terms, distinct, widths, weight=weight) if fits_at_once else None
    step = max(1, _ENTRIES_AT_ONCE // (num_rows + 1))
    for start in range(0, len(batches), step):
        block, table = kinds[start : start + step], whole
        if table is None:
            present, inverse = np.unique(block, return_inverse=True)
            block = inverse.reshape(block.shape)
            table = price_table(terms, distinct[present], widths[present], weight=weight)
        yield _read_back(cheapest_by_all_pairs(table, block), batches[start : start + step])


def _read_back(begins: NDArray[np.int32], batches: NDArray[np.int64]) -> _Shapes:
    """Read the micro-batches of each batch back, from its last to its first."""
    batch = np.arange(len(batches))
    ends = np.full(len(batches), batches.shape[1])
    shapes = []
    while len(batch):
        starts = begins[batch, ends].astype(np.int64)
        shapes.append((ends - starts, batches[batch, starts]))
        batch, ends = batch[starts > 0], starts[starts > 0]
    return _joined(shapes)


def _by_rows(batches: NDArray[np.int64], max_rows: int) -> _Shapes:
    starts = np.arange(0, batches.shape[1], max_rows)
    rows = np.minimum(batches.shape[1] - starts, max_rows)
    return np.tile(rows, len(batches)), batches[:, starts].ravel()


def _joined(shapes: Iterable[_Shapes]) -> _Shapes:
    rows, padded = zip(*shapes, strict=True)
    return np.concatenate(rows), np.concatenate(padded)


def _totals(
    cut_up: list[_Shapes], looked_at: list[int], num_steps: list[int], tokens: NDArray[np.int64], costs: Costs
) -> Totals:
    """Add up, of the full batches and of the last, their shapes, how many were looked at, and how many there are."""
    num_micro_batches = padded_tokens = seconds = 0.0
    for (rows, padded), num_looked_at, num in zip(cut_up, looked_at, num_steps, strict=True):
        share = num / max(num_looked_at, 1)
        distinct_rows, distinct_padded, counts = _distinct(rows, padded)
        num_micro_batches += share * len(rows)
        padded_tokens += share * int(np.dot(rows, padded))
        seconds += share * float(np.dot(counts, costs.seconds(distinct_rows, distinct_padded)))
    demanding = _most_demanding(*_distinct(*_joined(cut_up)), costs)
    return Totals(
        num_steps=sum(num_steps),
        num_micro_batches=round(num_micro_batches),
        seconds=seconds,
        padded_tokens=round(padded_tokens),
        real_tokens=int(tokens.sum()),
        widest=demanding[0],
        shapes=demanding,
    )


def _packed_totals(
    terms: Terms,
    tokens: NDArray[np.int64],
    batches: NDArray[np.int64],
    rest: NDArray[np.int64],
    *,
    fixed_rows: int | None,
) -> Totals:
    """Add up packed micro-batches, each in the shape of rows of equal length that has its tokens."""
    packed, distinct = PackedCosts(costs=terms.costs, cap_bytes=terms.cap_bytes), np.unique(tokens)
    capacities = packed.capacities(distinct, most=int(tokens.sum()))
    if not terms.lone_rows_may_exceed and fixed_rows is None:
        _require_each_fits(terms, tokens, distinct[capacities == 0])
    capacities = np.maximum(capacities, distinct)
    looked_at = batches[:: max(1, batches.size // _MOST_ROWS_IN_BINS)]
    found: list[tuple[int, int, int, float]] = []  # tokens, the longest row's, squares, and how many it stands for
    for some, share in ((looked_at, len(batches) / max(len(looked_at), 1)), (rest, 1.0)):
        for lengths in some:
            for row in _packs(lengths, capacities[np.searchsorted(distinct, lengths)], fixed_rows):
                found.append((int(row.sum()), int(row[0]), int(row @ row), share))
    sums, longest, squares = np.array([each[:3] for each in found]).T
    shares = np.array([each[3] for each in found])
    demanding = _most_demanding(*_distinct(*packed.as_equal_rows(sums, longest)), terms.costs)
    return Totals(
        num_steps=len(batches) + len(rest),
        num_micro_batches=round(float(shares.sum())),
        seconds=float(shares @ packed.seconds(sums, squares)),
        padded_tokens=round(float(shares @ (-(-sums // terms.costs.multiple) * terms.costs.multiple))),
        real_tokens=int(tokens.sum()),
        widest=demanding[0],
        shapes=demanding,
    )


def _packs(
    lengths: NDArray[np.int64], capacities: NDArray[np.int64], fixed_rows: int | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the lengths of each packed micro-batch of a step, whose longest row is first."""
    if fixed_rows is not None:
        yield from np.split(lengths, range(fixed_rows, len(lengths), fixed_rows))
    else:
        yield from (lengths[positions] for positions in fewest_bins(lengths.tolist(), capacities.tolist()))


_MOST_ROWS_IN_BINS = 1 << 20  # as many take two seconds


def _distinct(
    rows: NDArray[np.int64], padded: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each shape once, by padded length, then rows; and how often it occurs."""
    most_rows = int(rows.max(initial=0)) + 1
    keys, counts = np.unique(padded * most_rows + rows, return_counts=True)
    return keys % most_rows, keys // most_rows, counts


def _most_demanding(
    rows: NDArray[np.int64], padded: NDArray[np.int64], counts: NDArray[np.int64], costs: Costs
) -> tuple[Shape, ...]:
    """Return the widest, and those of which no other has as many rows and as many tokens; by falling peak."""
    peaks, seconds = np.ceil(costs.peak_bytes(rows, padded)), costs.seconds(rows, padded)
    most_rows_of_longer = np.append(np.maximum.accumulate(rows[::-1])[::-1][1:], 0)
    by_peak = np.argsort(-peaks, kind="stable")
    is_chosen = rows > most_rows_of_longer
    is_chosen[by_peak[0]] = True
    return tuple(
        Shape(
            rows=int(rows[number]),
            padded_length=int(padded[number]),
            peak_bytes=int(peaks[number]),
            seconds=float(seconds[number]),
            count=int(counts[number]),
        )
        for number in by_peak[is_chosen[by_peak]][:_MOST_SHAPES]
    )


# Beyond this many rows their pairs are too many to be looked at for each step: 512 take about 15 ms on one core.
MOST_ROWS_FOR_ALL_PAIRS = 512


class RowTooLongError(Exception):
    """Tell that a row is over the cap alone."""

    def __init__(self, *, position: int, length: int, peak_bytes: int, cap_bytes: int) -> None:
        super().__init__(f"row {position} of {length} tokens takes {peak_bytes} bytes alone, the cap is {cap_bytes}")
        self.position = position  # among the rows to be cut
        self.length = length
        self.peak_bytes = peak_bytes
        self.cap_bytes = cap_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Say what a micro-batch may take, and what makes one better than another."""

    costs: Costs
    cap_bytes: int
    most_rows: int | None = None
    largest: bool = False  # fewest micro-batches, then least padding; else least predicted time
    lone_rows_may_exceed: bool = False

    def widths(self, lengths: NDArray[np.int64], *, most: int, most_seconds: float = inf) -> NDArray[np.int64]:
        """Return the most rows of each length; 0: not even one."""
        most = min(most, self.most_rows or most)
        widths = self.costs.rows_that_fit(lengths, cap_bytes=self.cap_bytes, most=most, most_seconds=most_seconds)
        return np.maximum(widths, 1) if self.lone_rows_may_exceed else widths

    def prices(self, rows: NDArray[np.float64], length: NDArray[np.int64], *, weight: int) -> NDArray[np.float64]:
        """Return what a micro-batch costs; shapes broadcast. weight: more tokens than the padding of any cut.

        Whole numbers below 2**53, and so exact, where the largest are asked for.
        """
        return weight + rows * length if self.largest else self.costs.seconds(rows, length)


def borders(terms: Terms, lengths: NDArray[np.int64], *, limits: Sequence[float] = (inf,)) -> list[list[int]]:
    """Return where each micro-batch begins, and the end; for each limit on the seconds of one.

    lengths: tokens of at least one row, the longest first; each fits alone, or may exceed the cap, as it may a limit.
    Up to MOST_ROWS_FOR_ALL_PAIRS rows the cheapest cut whatever the prices are; beyond them under the Monge
    condition, which a time of a + b·N + c·N·T (N padded tokens, T the longest row) with a floor meets, and so does
    the count of micro-batches.
    """
    num_rows = len(lengths)
    weight = num_rows * int(lengths[0]) + 1
    distinct, kinds = np.unique(lengths, return_inverse=True)
    if num_rows <= MOST_ROWS_FOR_ALL_PAIRS:
        table = price_table(terms, distinct, terms.widths(distinct, most=num_rows), weight=weight)
        lines = kinds + len(distinct) * np.arange(len(limits))[:, None]
        begins = cheapest_by_all_pairs(_limited(terms, table, distinct, limits), lines).tolist()
    else:
        begins, price = [], line_prices(terms, lengths, weight=weight)
        for limit in limits:
            widths = terms.widths(distinct, most=num_rows, most_seconds=limit)
            widths = np.minimum.accumulate(widths)  # of the shortest first: of longer rows no more fit
            begins.append(cheapest_by_queue(widths[kinds].tolist(), price))
    return [_read_one(each) for each in begins]


def _limited(
    terms: Terms, table: NDArray[np.float64], lengths: NDArray[np.int64], limits: Sequence[float]
) -> NDArray[np.float64]:
    """Return a price table under each limit on seconds, one below another; a row alone keeps its price."""
    rows = np.arange(1.0, table.shape[1] + 1)
    seconds = terms.costs.seconds(rows, lengths[:, None]) if terms.largest else table
    is_over = seconds > np.array(limits)[:, None, None]
    is_over[:, :, 0] = False
    limited = np.where(is_over, inf, table).reshape(-1, table.shape[1])
    return limited[:, : np.flatnonzero(np.isfinite(limited).any(axis=0))[-1] + 1]


def _read_one(begins: Sequence[int]) -> list[int]:
    ends = [len(begins) - 1]
    while ends[-1]:
        ends.append(begins[ends[-1]])
    return ends[::-1]


def price_table(
    terms: Terms, lengths: NDArray[np.int64], widths: NDArray[np.int64], *, weight: int
) -> NDArray[np.float64]:
    """Return the prices of micro-batches, [length, rows - 1]; infinite where one has more rows than it may."""
    rows = np.arange(1, int(widths.max()) + 1)
    table = terms.prices(rows.astype(np.float64), lengths[:, None], weight=weight)
    table[rows > widths[:, None]] = inf
    return table


def cheapest_by_all_pairs(table: NDArray[np.float64], kinds: NDArray[np.intp]) -> NDArray[np.int32]:
    """Return [B, n + 1]: for B batches, where the last micro-batch of the cheapest cut of the first j rows begins.

    kinds: [B, n], each row's line of the table. Exact whatever the prices are. O(n · widest) a batch. Of partitions
    that cost the same, the one whose last micro-batch is the largest.
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
    """Return where the last micro-batch of the cheapest cut of the first j rows begins, for j from 0 to n.

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
    """Add a beginning for the ends up to `reach`; those that it is better than from their first end on leave."""
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
    """Return price(begin, rows) of rows in order: straight pieces between the kinks, read without an array."""
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
