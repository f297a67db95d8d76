"""What all effective batches of a data set cost once they are cut, in seconds for a million rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs
from brim.batching.partition import (
    MOST_ROWS_FOR_ALL_PAIRS,
    RowTooLongError,
    Terms,
    borders,
    cheapest_by_all_pairs,
    price_table,
)

_ENTRIES_AT_ONCE = 1 << 18  # of the table of a block of batches: 2 MiB stay in a core's cache
_ENTRIES_OF_PRICES = 1 << 24  # 128 MiB
# What one core gets through in one or two seconds, since a plan has several candidates; evenly chosen steps stand for
# the rest.
_MOST_PAIRS = 1 << 29
_MOST_ROWS_IN_QUEUES = 1 << 17
_MOST_SHAPES = 16

_Shapes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows and padded length of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What micro-batches have in common that are alike to the device."""

    rows: int
    padded_length: int  # tokens
    peak_bytes: int  # predicted
    seconds: float  # predicted, of one of them
    count: int  # among the steps that were looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of all steps; extrapolated from those that were looked at where these are fewer."""

    num_steps: int
    num_steps_looked_at: int
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
    most_rows: int | None = None,
    largest: bool = False,
    lone_rows_may_exceed: bool = False,
) -> Totals:
    """What `cut` comes to, effective batch by effective batch, with the same cuts; the last may be smaller.

    lengths: tokens of each of at least one row, in the order in which they are consumed.
    O(n · widest micro-batch) up to MOST_ROWS_FOR_ALL_PAIRS rows a batch, for many batches at a time; beyond them
    O(n log n), one after the other.

    Raises RowTooLongError for the longest row that is over the cap alone.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    terms = Terms(
        costs=costs,
        cap_bytes=cap_bytes,
        most_rows=most_rows,
        largest=largest,
        lone_rows_may_exceed=lone_rows_may_exceed,
    )
    _require_each_fits(terms, tokens)
    batches, rest = _sorted_batches(tokens, batch_size)
    looked_at = _evenly_chosen(batches, _most_steps(batch_size))
    cut_up = [_cut_all(terms, looked_at), _cut_all(terms, rest)]
    return _totals(cut_up, [len(looked_at), len(rest)], [len(batches), len(rest)], tokens, costs)


def cut_totals_by_rows(lengths: ArrayLike, batch_size: int, *, costs: Costs, max_rows: int) -> Totals:
    """What `cut_by_rows` comes to, effective batch by effective batch; see cut_totals."""
    tokens = np.asarray(lengths, dtype=np.int64)
    batches, rest = _sorted_batches(tokens, batch_size)
    num_steps = [len(batches), len(rest)]
    return _totals([_by_rows(batches, max_rows), _by_rows(rest, max_rows)], num_steps, num_steps, tokens, costs)


def _sorted_batches(tokens: NDArray[np.int64], batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B, n] and [0 or 1, fewer]: the full effective batches and the last one, each with its longest row first."""
    num_full = len(tokens) // batch_size
    full = tokens[: num_full * batch_size].reshape(num_full, batch_size)
    rest = tokens[num_full * batch_size :]
    return -np.sort(-full, axis=1), -np.sort(-rest[None], axis=1)[: len(rest)]


def _most_steps(batch_size: int) -> int:
    if batch_size > MOST_ROWS_FOR_ALL_PAIRS:
        return max(1, _MOST_ROWS_IN_QUEUES // batch_size)
    return _MOST_PAIRS // batch_size**2


def _evenly_chosen(batches: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    if len(batches) <= most:
        return batches
    return batches[np.arange(most) * len(batches) // most]


def _require_each_fits(terms: Terms, tokens: NDArray[np.int64]) -> None:
    distinct = np.unique(tokens)
    too_long = distinct[terms.widths(distinct, most=1) == 0]
    if len(too_long):
        raise RowTooLongError(
            position=int(np.argmax(tokens == too_long[-1])),
            length=int(too_long[-1]),
            peak_bytes=int(np.ceil(terms.costs.peak_bytes(1, too_long[-1]))),
            cap_bytes=terms.cap_bytes,
        )


def _cut_all(terms: Terms, batches: NDArray[np.int64]) -> _Shapes:
    """batches: [B, n], the longest row of each first."""
    if batches.size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    num_rows = batches.shape[1]
    one_by_one = num_rows > MOST_ROWS_FOR_ALL_PAIRS
    return _joined(_by_borders(terms, batches) if one_by_one else _by_all_pairs(terms, batches))


def _by_borders(terms: Terms, batches: NDArray[np.int64]) -> Iterator[_Shapes]:
    for lengths in batches:
        bounds = np.array(borders(terms, lengths, np.arange(len(lengths))))
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
    """The micro-batches of each batch, from its last to its first."""
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
    """Of the full batches and of the last: their shapes, how many were looked at, how many there are."""
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
        num_steps_looked_at=sum(looked_at),
        num_micro_batches=round(num_micro_batches),
        seconds=seconds,
        padded_tokens=round(padded_tokens),
        real_tokens=int(tokens.sum()),
        widest=demanding[0],
        shapes=demanding,
    )


def _distinct(
    rows: NDArray[np.int64], padded: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each shape once, by padded length, then rows; and how often it occurs."""
    most_rows = int(rows.max(initial=0)) + 1
    keys, counts = np.unique(padded * most_rows + rows, return_counts=True)
    return keys % most_rows, keys // most_rows, counts


def _most_demanding(
    rows: NDArray[np.int64], padded: NDArray[np.int64], counts: NDArray[np.int64], costs: Costs
) -> tuple[Shape, ...]:
    """The widest, and those of which no other has as many rows and as many tokens; by falling peak."""
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
