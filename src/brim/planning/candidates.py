"""What one way to run would cost with a data set, an effective batch and a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.batching.costs import Costs
from brim.batching.totals import Totals, cut_totals
from brim.planning.budget import Budget
from brim.planning.plan import BoundBy, Candidate, TimeSource, Way
from brim.units import format_bytes

Shape = tuple[int, int]  # rows, tokens

_MOST_ROUNDS = 3  # the allocator's overhead depends on the shapes, which depend on the cap, which depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCosts:
    """All that is known of one way before the data is cut."""

    way: Way
    costs: Costs
    update_bytes: int  # allocated at the peak of the optimizer's own step, and of the load of the weights
    update_s: float  # of the optimizer's own step
    overhead_bytes: Callable[[Sequence[Shape]], int]  # reserved beyond allocated, after steps of these shapes
    bound_by: BoundBy | None
    time_source: TimeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run is to do, whatever the way."""

    lengths: NDArray[np.int64]  # tokens of each row, in the order in which an epoch takes them
    effective_batch_size: int
    most_rows: int | None  # rows of a micro-batch at most
    largest: bool  # the largest micro-batches instead of the fastest


def candidate(known: WayCosts, work: Work, budget: Budget) -> Candidate:
    """The way with its cap, its cut of an epoch and what that costs; or why it does not fit."""
    longest = int(work.lengths.max())
    cap_bytes, totals, binds = _settled(known, work, budget)
    overhead_bytes = budget.reserved_bytes - cap_bytes
    alone_bytes = int(known.costs.peak_bytes(1, longest))
    total_alone = alone_bytes + overhead_bytes + budget.outside_bytes
    reason = _misfit(known, budget, alone_bytes, cap_bytes, longest)
    if totals is None or reason is not None:
        return Candidate(
            way=known.way,
            fits=False,
            reason=reason or "",
            single_row_bytes=total_alone,
            total_bytes=None,
            cap_bytes=cap_bytes,
            cap_binds=True,
            widest=None,
            micro_batches_per_step=None,
            padding=None,
            seconds_per_epoch=None,
            bound_by=None,
            time_source=known.time_source,
            too_long=_too_long(known.costs, work.lengths, cap_bytes),
            longest_that_fits=_longest_that_fits(known.costs, longest, cap_bytes),
        )
    rows, tokens, peak_bytes = totals.widest
    total_bytes = max(peak_bytes, known.update_bytes) + overhead_bytes + budget.outside_bytes
    return Candidate(
        way=known.way,
        fits=True,
        reason=f"its largest micro-batch, {rows:,} × {tokens:,} tokens, takes {format_bytes(total_bytes)} in all",
        single_row_bytes=total_alone,
        total_bytes=total_bytes,
        cap_bytes=cap_bytes,
        cap_binds=binds,
        widest=(rows, tokens),
        micro_batches_per_step=totals.num_micro_batches / totals.num_steps_looked_at,
        padding=totals.padded_tokens / totals.real_tokens,
        seconds_per_epoch=_seconds(totals) + known.update_s * totals.num_steps,
        bound_by=known.bound_by,
        time_source=known.time_source,
        too_long=(),
        longest_that_fits=longest,
    )


def _settled(known: WayCosts, work: Work, budget: Budget) -> tuple[int, Totals | None, bool]:
    """A cap that leaves the allocator what it needs for the micro-batches that this very cap gives.

    With the cut under it (None: the longest row does not fit alone), and whether without a cap the cut would be another.
    """
    longest = int(work.lengths.max())
    alone_bytes = float(known.costs.peak_bytes(1, longest))
    cap_bytes = budget.reserved_bytes - known.overhead_bytes([(1, longest)])
    if alone_bytes > cap_bytes:
        return cap_bytes, None, True
    free = _totals(known, work, cap_bytes=_NO_CAP)
    cap_bytes = min(cap_bytes, budget.reserved_bytes - known.overhead_bytes(free.shapes))
    if free.widest[2] <= cap_bytes:
        return cap_bytes, free, False
    totals = None
    for _ in range(_MOST_ROUNDS):
        if alone_bytes > cap_bytes:
            return cap_bytes, None, True
        totals = _totals(known, work, cap_bytes=cap_bytes)
        left_bytes = budget.reserved_bytes - known.overhead_bytes(totals.shapes)
        if left_bytes >= cap_bytes:
            break
        cap_bytes = left_bytes
    return cap_bytes, totals, True


def _totals(known: WayCosts, work: Work, *, cap_bytes: int) -> Totals:
    return cut_totals(
        work.lengths,
        batch_size=work.effective_batch_size,
        costs=known.costs,
        cap_bytes=cap_bytes,
        most_rows=work.most_rows,
        largest=work.largest,
    )


_NO_CAP = 2**62


def _seconds(totals: Totals) -> float:
    """Of all steps, where only some were looked at."""
    return totals.seconds * totals.num_steps / totals.num_steps_looked_at


def _misfit(known: WayCosts, budget: Budget, alone_bytes: int, cap_bytes: int, longest: int) -> str | None:
    if alone_bytes > cap_bytes:
        return (
            f"the longest row, {longest:,} tokens, takes {format_bytes(alone_bytes)} alone, "
            f"and {format_bytes(max(cap_bytes, 0))} are there"
        )
    if known.update_bytes > cap_bytes:
        return (
            f"the optimizer's own step takes {format_bytes(known.update_bytes)}, "
            f"and {format_bytes(max(cap_bytes, 0))} are there"
        )
    return None


def _too_long(costs: Costs, lengths: NDArray[np.int64], cap_bytes: int) -> tuple[int, ...]:
    return tuple(int(row) for row in np.flatnonzero(costs.peak_bytes(1, lengths) > cap_bytes))


def _longest_that_fits(costs: Costs, longest: int, cap_bytes: int) -> int | None:
    """Tokens of the longest row that fits alone; None: not even one of two tokens does."""
    tokens = np.arange(2, max(longest, 2) + 1)
    fitting = tokens[costs.peak_bytes(1, tokens) <= cap_bytes]
    return int(fitting[-1]) if len(fitting) else None
