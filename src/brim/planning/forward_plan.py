"""How rows are cut for forward passes without gradients: a cap in bytes, and what the passes take and last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.by_length import ByLength
from brim.batching.costs import Costs
from brim.batching.totals import Totals, cut_totals
from brim.planning.budget import Budget
from brim.planning.shape_cache import Shape
from brim.units import format_bytes, format_seconds

# Rows are taken in the order of their lengths, so many at a time: of a million rows, those of a window differ in
# length by a thousandth of the spread, and cutting them takes some ten milliseconds.
WINDOW_ROWS = 4096
_MOST_ROUNDS = 3  # the allocator's overhead depends on the shapes, which depend on the cap, which depends on it
_MOST_HELD = 1.5  # times what is allocated: an allocator that is left alone comes to hold no more
# Batches larger than those whose time for a token is so near to the least bring nothing but risk.
NEAR_LEAST_TIME = 0.01

Source: TypeAlias = Literal["traced", "closed form"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """Batches for rows that are scored, and why they are so."""

    budget: Budget
    costs: Costs
    source: Source  # of the costs
    cap_bytes: int  # allocated, of a batch; some rows may exceed it alone
    room_bytes: int  # that might be allocated: the cap is lower where larger batches bring nothing
    widest: Shape  # rows, tokens
    widest_bytes: int  # allocated
    total_bytes: int  # at the peak, with what lies outside PyTorch and what its allocator holds beyond
    num_batches: int
    padding: float  # padded tokens by real ones
    seconds: float
    num_too_long: int  # rows that do not fit even alone, by the prediction; they are tried
    reason: str
    largest: bool = False  # the fewest batches, then least padding; else least predicted time

    def cutter(self) -> ByLength:
        """What the rows are cut by."""
        return ByLength(costs=self.costs, cap_bytes=self.cap_bytes, largest=self.largest)

    def __str__(self) -> str:
        rows, tokens = self.widest
        batches = "1 batch" if self.num_batches == 1 else f"{self.num_batches:,} batches"
        at_most = "at most " if self.source == "closed form" else ""
        return (
            f"{batches} of up to {rows:,} × {tokens:,} tokens, {self.padding - 1:.1%} padding; "
            f"{at_most}{format_bytes(self.total_bytes)} of {format_bytes(self.budget.limit_bytes)}; "
            f"about {format_seconds(self.seconds)} ({self.reason})"
        )


def forward_plan(
    lengths: ArrayLike,
    *,
    costs: Costs,
    source: Source,
    budget: Budget,
    room_bytes: int,
    useful_tokens: int,
    overhead_bytes: Callable[[Sequence[Shape]], int],
    reason: str,
    largest: bool = False,
) -> ForwardPlan:
    """Cut under the least of what there is and what brings something.

    lengths: tokens of each of at least one row. room_bytes: that PyTorch may hold, weights included. useful_tokens: of
    a batch; more bring nothing. overhead_bytes: what its allocator holds beyond what is allocated, with these shapes.
    largest: see ForwardPlan.
    """
    tokens = -np.sort(-np.asarray(lengths, dtype=np.int64))
    wanted_bytes = bytes_of_useful(costs, tokens, useful_tokens)
    cap_bytes = min(wanted_bytes, room_bytes)
    for _ in range(_MOST_ROUNDS):
        totals, beyond_bytes = _cut(tokens, costs, cap_bytes, largest=largest), 0
        if _MOST_HELD * totals.widest.peak_bytes <= room_bytes:
            break
        beyond_bytes = overhead_bytes([(shape.rows, shape.padded_length) for shape in totals.shapes])
        if min(cap_bytes, totals.widest.peak_bytes) + beyond_bytes <= room_bytes:
            break
        cap_bytes = room_bytes - beyond_bytes
    else:
        totals = _cut(tokens, costs, cap_bytes, largest=largest)
    widest = totals.widest
    return ForwardPlan(
        budget=budget,
        costs=costs,
        source=source,
        cap_bytes=cap_bytes,
        room_bytes=room_bytes,
        widest=(widest.rows, widest.padded_length),
        widest_bytes=widest.peak_bytes,
        total_bytes=widest.peak_bytes + beyond_bytes + budget.limit_bytes - budget.margin_bytes - room_bytes,
        num_batches=totals.num_micro_batches,
        padding=totals.padded_tokens / totals.real_tokens,
        seconds=totals.seconds,
        num_too_long=int(np.count_nonzero(costs.peak_bytes(1, tokens) > room_bytes)),
        reason=reason,
        largest=largest,
    )


def bytes_of_useful(costs: Costs, lengths: NDArray[np.int64], useful_tokens: int) -> int:
    """The cap with which no batch has more tokens than that; the longest row fits under it alone."""
    distinct = np.unique(lengths)
    rows = np.maximum(useful_tokens // distinct, 1)
    return int(np.ceil(costs.peak_bytes(rows, distinct).max()))


def useful_tokens(seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], *, least: int, most: int) -> int:
    """Tokens of the smallest batch whose time for a token is near the least.

    seconds: of batches of so many tokens, of rows of a usual length. least, most: tokens to look at.
    """
    tokens = np.unique(np.geomspace(least, max(most, least), 64).round())
    per_token = seconds(tokens) / tokens
    near = per_token <= (1 + NEAR_LEAST_TIME) * per_token.min()
    return int(tokens[int(np.argmax(near))])


def _cut(lengths: NDArray[np.int64], costs: Costs, cap_bytes: int, *, largest: bool) -> Totals:
    return cut_totals(
        lengths, WINDOW_ROWS, costs=costs, cap_bytes=cap_bytes, largest=largest, lone_rows_may_exceed=True
    )
