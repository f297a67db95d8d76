"""Cut one effective batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs
from brim.batching.partition import Terms, borders


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together."""

    rows: NDArray[np.intp]  # positions in the effective batch
    padded_length: int  # tokens of the longest row, to which the others are padded
    peak_bytes: int | None = None  # predicted; None: no prediction was asked
    seconds: float | None = None  # predicted

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def cut(
    lengths: ArrayLike,
    *,
    costs: Costs,
    cap_bytes: int,
    most_rows: int | None = None,
    largest: bool = False,
    lone_rows_may_exceed: bool = False,
) -> list[MicroBatch]:
    """Every row once, none over the cap, least predicted time; the longest rows first.

    lengths: tokens of each row, at least 1 each. most_rows: at most so many together. largest: the fewest
    micro-batches instead, and of these cuts the one with the least padding. lone_rows_may_exceed: a row that is over
    the cap alone is a micro-batch by itself.

    Both predictions depend on (rows, longest row) alone and do not fall as the longest row grows, so some cheapest cut
    goes along the order of length: any other can be rearranged to it without a dearer micro-batch. It is found by
    dynamic programming, exact for any costs up to MOST_ROWS_FOR_ALL_PAIRS rows (partition.py); beyond them it takes
    O(n log n) and is exact for times that are convex in the padded tokens, with slopes that do not fall with the
    length, and a peak that does not fall with the length. Equal input gives equal cuts.

    Raises RowTooLongError where a row is over the cap alone and may not be.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if not len(tokens):
        return []
    terms = Terms(
        costs=costs,
        cap_bytes=cap_bytes,
        most_rows=most_rows,
        largest=largest,
        lone_rows_may_exceed=lone_rows_may_exceed,
    )
    order = longest_first(tokens)
    return priced(order, tokens, borders(terms, tokens[order], order), costs)


def cut_by_rows(lengths: NDArray[np.integer], *, max_rows: int) -> Iterator[NDArray[np.intp]]:
    """Positions of each micro-batch: every row once, at most `max_rows` together, neighbours in length together.

    lengths: tokens of each row. The longest come first, so that a misfit shows at once. Since the loss is divided
    once by the tokens of the whole effective batch, the order changes padding and nothing else.
    """
    order = longest_first(lengths)
    for start in range(0, len(order), max_rows):
        yield order[start : start + max_rows]


def widest(micro_batches: Sequence[MicroBatch]) -> MicroBatch:
    """The one with the highest predicted peak, the first of several; each has a prediction."""
    return max(micro_batches, key=lambda micro_batch: micro_batch.peak_bytes or 0)


def longest_first(lengths: NDArray[np.integer]) -> NDArray[np.intp]:
    """Positions by falling length; equal lengths stay in their order."""
    return np.argsort(-lengths, kind="stable")


def priced(order: NDArray[np.intp], tokens: NDArray[np.int64], bounds: Sequence[int], costs: Costs) -> list[MicroBatch]:
    """The rows in this order, cut at these bounds (the first 0, the last their number), with predictions.

    tokens: of each row, by its position in the effective batch.
    """
    begins, num_rows = np.array(bounds[:-1]), np.diff(bounds)
    padded = np.maximum.reduceat(tokens[order], begins)
    peaks, seconds = np.ceil(costs.peak_bytes(num_rows, padded)), costs.seconds(num_rows, padded)
    return [
        MicroBatch(
            rows=order[begin : begin + rows],
            padded_length=int(padded_length),
            peak_bytes=int(peak),
            seconds=float(second),
        )
        for begin, rows, padded_length, peak, second in zip(begins, num_rows, padded, peaks, seconds, strict=True)
    ]
