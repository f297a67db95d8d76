"""What one way to run would cost with a data set, an effective batch and a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.batching.costs import Costs
from brim.batching.totals import Totals, cut_totals, cut_totals_by_rows
from brim.batching.widths import longest_row_that_fits
from brim.planning.budget import Budget
from brim.planning.plan import BoundBy, Candidate, TimeSource, Way
from brim.units import format_bytes

RowsAndTokens: TypeAlias = tuple[int, int]

_MOST_ROUNDS = 3  # the allocator's overhead depends on the shapes, which depend on the cap, which depends on it
_NO_CAP = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCosts:
    """All that is known of one way before the data is cut."""

    way: Way
    costs: Costs
    least_bytes: int  # allocated whatever the rows are: in the optimizer's own step, or while the weights are loaded
    state_bytes: int  # of the optimizer
    update_s: float  # of the optimizer's own step
    overhead_bytes: Callable[[Sequence[RowsAndTokens]], int]  # reserved beyond allocated, after steps of these shapes
    bound_by: Callable[[Sequence[RowsAndTokens]], BoundBy]
    advice: Callable[[Sequence[RowsAndTokens]], tuple[str, ...]]  # on what would make it faster
    time_source: TimeSource
    traced_at: Callable[[int, int], Costs]  # the costs once one more shape, (rows, tokens), has been traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is to do, whatever the way."""

    lengths: NDArray[np.int64]  # tokens of each row, in the order in which an epoch takes them
    effective_batch_size: int  # the most that a step has
    fixed_rows: int | None  # rows of each micro-batch, where the configuration says so; None: cut by length
    largest: bool  # the largest micro-batches instead of the fastest

    @property
    def longest(self) -> int:
        return int(self.lengths.max())


def candidate(known: WayCosts, task: Task, budget: Budget) -> Candidate:
    """The way with its cap, its cut of an epoch and what that costs; or why it does not fit."""
    cap = _settled(known, task, budget)
    reason = _misfit(known, task, cap)
    if cap.totals is None or reason is not None:
        return _unfit(known, task, budget, cap, reason or "")
    totals = cap.totals
    widest = totals.widest
    total_bytes = max(widest.peak_bytes, known.least_bytes) + budget.limit_bytes - budget.margin_bytes - cap.num_bytes
    return Candidate(
        way=known.way,
        fits=True,
        reason=f"its largest micro-batch, {widest.rows:,} × {widest.padded_length:,} tokens, makes "
        f"{format_bytes(total_bytes)} in all",
        single_row_bytes=_alone_in_all(known, task, budget, cap),
        total_bytes=total_bytes,
        cap_bytes=cap.num_bytes,
        cap_binds=cap.binds,
        widest=(widest.rows, widest.padded_length),
        micro_batches_per_step=totals.num_micro_batches / totals.num_steps,
        padding=totals.padded_tokens / totals.real_tokens,
        seconds_per_epoch=totals.seconds + known.update_s * totals.num_steps,
        bound_by=known.bound_by(_shapes(totals)),
        time_source=known.time_source,
        too_long=(),
        longest_that_fits=task.longest,
        advice=known.advice(_shapes(totals)),
        update_s=known.update_s,
    )


def verified(known: WayCosts, task: Task, budget: Budget) -> tuple[WayCosts, Candidate]:
    """The candidate; where its cap binds, after a trace of its widest micro-batch, which decides whether it fits.

    Between traces a peak is predicted from above, so that a little room can be lost; or, rarely, from below.
    """
    found = candidate(known, task, budget)
    if found.widest is None or not found.cap_binds:
        return known, found
    known = replace(known, costs=known.traced_at(*found.widest))
    return known, candidate(known, task, budget)


def epoch(task: Task, costs: Costs, *, cap_bytes: int) -> Totals:
    """The cut of an epoch's effective batches. Raises RowTooLongError."""
    if task.fixed_rows is not None:
        return cut_totals_by_rows(task.lengths, task.effective_batch_size, costs=costs, max_rows=task.fixed_rows)
    return cut_totals(task.lengths, task.effective_batch_size, costs=costs, cap_bytes=cap_bytes, largest=task.largest)


def cut_anew(taken: Candidate, task: Task, before: Costs, now: Costs, *, cap_bytes: int) -> Candidate:
    """A candidate that fits, once the device has shown other costs or another cap. before: the costs that it has."""
    assert taken.seconds_per_epoch is not None, "it fits"
    assert taken.total_bytes is not None, "it fits"
    had, totals = epoch(task, before, cap_bytes=taken.cap_bytes), epoch(task, now, cap_bytes=cap_bytes)
    widest = totals.widest
    more_bytes = widest.peak_bytes - had.widest.peak_bytes
    return replace(
        taken,
        total_bytes=max(taken.total_bytes + more_bytes, taken.single_row_bytes),
        cap_bytes=cap_bytes,
        cap_binds=epoch(task, now, cap_bytes=_NO_CAP).widest.peak_bytes > cap_bytes,
        widest=(widest.rows, widest.padded_length),
        micro_batches_per_step=totals.num_micro_batches / totals.num_steps,
        padding=totals.padded_tokens / totals.real_tokens,
        seconds_per_epoch=taken.seconds_per_epoch + totals.seconds - had.seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cap:
    num_bytes: int  # allocated
    totals: Totals | None  # None: the longest row does not fit alone
    binds: bool  # without it the cut would be another


def _settled(known: WayCosts, task: Task, budget: Budget) -> _Cap:
    """A cap that leaves the allocator what it needs for the micro-batches that this very cap gives."""
    alone_bytes = float(known.costs.peak_bytes(1, task.longest))
    cap_bytes = _left_bytes(known, budget, 1, task.longest)
    if alone_bytes > cap_bytes:
        return _Cap(num_bytes=cap_bytes, totals=None, binds=True)
    free = epoch(task, known.costs, cap_bytes=_NO_CAP)
    loose_bytes = min(cap_bytes, budget.reserved_bytes - known.overhead_bytes(_shapes(free)))
    if free.widest.peak_bytes <= loose_bytes or task.fixed_rows is not None:
        return _Cap(num_bytes=loose_bytes, totals=free, binds=free.widest.peak_bytes > loose_bytes)
    for _ in range(_MOST_ROUNDS):
        totals = epoch(task, known.costs, cap_bytes=cap_bytes)
        left_bytes = budget.reserved_bytes - known.overhead_bytes(_shapes(totals))
        if left_bytes >= cap_bytes:
            return _Cap(num_bytes=cap_bytes, totals=totals, binds=True)
        cap_bytes = left_bytes
        if alone_bytes > cap_bytes:
            return _Cap(num_bytes=cap_bytes, totals=None, binds=True)
    return _Cap(num_bytes=cap_bytes, totals=epoch(task, known.costs, cap_bytes=cap_bytes), binds=True)


def _misfit(known: WayCosts, task: Task, cap: _Cap) -> str | None:
    there = f"{format_bytes(max(cap.num_bytes, 0))} are there"
    # What is left for rows of a fixed number depends on them: where they are too many, that is why.
    if known.least_bytes > cap.num_bytes and (cap.totals is None or task.fixed_rows is None):
        return f"weights and optimizer alone take {format_bytes(known.least_bytes)}, {there}"
    if cap.totals is None:
        alone_bytes = int(known.costs.peak_bytes(1, task.longest))
        return f"the longest row, {task.longest:,} tokens, takes {format_bytes(alone_bytes)}, {there}"
    widest = cap.totals.widest
    if widest.peak_bytes > cap.num_bytes:
        return f"{widest.rows:,} × {widest.padded_length:,} tokens take {format_bytes(widest.peak_bytes)}, {there}"
    return None


def _unfit(known: WayCosts, task: Task, budget: Budget, cap: _Cap, reason: str) -> Candidate:
    alone = cap if task.fixed_rows is None else replace(cap, num_bytes=_left_bytes(known, budget, 1, task.longest))
    return Candidate(
        way=known.way,
        fits=False,
        reason=reason,
        single_row_bytes=_alone_in_all(known, task, budget, alone),
        total_bytes=None,
        cap_bytes=cap.num_bytes,
        cap_binds=True,
        widest=None,
        micro_batches_per_step=None,
        padding=None,
        seconds_per_epoch=None,
        bound_by=None,
        time_source=known.time_source,
        too_long=tuple(int(row) for row in np.flatnonzero(known.costs.peak_bytes(1, task.lengths) > alone.num_bytes)),
        longest_that_fits=_longest_that_fits(known, task, budget, cap) or None,
    )


def _longest_that_fits(known: WayCosts, task: Task, budget: Budget, cap: _Cap) -> int:
    """Tokens of a row that fits, alone or, where the configuration says so, with others as long; 0: none."""
    if task.fixed_rows is None:
        return longest_row_that_fits(known.costs, cap.num_bytes, up_to=task.longest)
    rows, left_bytes = task.fixed_rows, _left_bytes(known, budget, 1, task.longest)
    for _ in range(_MOST_ROUNDS):
        tokens = longest_row_that_fits(known.costs, left_bytes, rows=rows, up_to=task.longest)
        if tokens == 0:
            return 0
        left_bytes = _left_bytes(known, budget, rows, tokens)
        if max(float(known.costs.peak_bytes(rows, tokens)), known.least_bytes) <= left_bytes:
            return tokens
    return 0


def _left_bytes(known: WayCosts, budget: Budget, rows: int, tokens: int) -> int:
    """What such micro-batches may allocate."""
    return budget.reserved_bytes - known.overhead_bytes([(rows, tokens)])


def _alone_in_all(known: WayCosts, task: Task, budget: Budget, cap: _Cap) -> int:
    """The longest row alone, with what is outside PyTorch and what its allocator holds beyond."""
    peak_bytes = max(int(known.costs.peak_bytes(1, task.longest)), known.least_bytes)
    return peak_bytes + budget.limit_bytes - budget.margin_bytes - cap.num_bytes


def _shapes(totals: Totals) -> list[RowsAndTokens]:
    return [(shape.rows, shape.padded_length) for shape in totals.shapes]
