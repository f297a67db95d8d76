"""Compute what each strategy costs for a data set, a batch and a budget, and choose the fastest that fits.

When a shape is tried on a device, real rows of about its size stand for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brim.batching import ByRows, Costs, Cutter, MicroBatch, Shape as MicroBatchShape, Totals, by_costs, cut_totals
from brim.distributed import deal
from brim.memory import Offload
from brim.memory.devices import Budget
from brim.planning.costs import BoundBy, Shape, Traces
from brim.planning.plan import Candidate, Host, Way, Wire, shape_in_words
from brim.units import format_bytes, format_count, format_seconds

_MOST_ROUNDS = 3  # the allocator's overhead depends on the shapes, which depend on the cap, which depends on it


_NO_CAP = 2**62


# Of an epoch, to see how well they can be dealt: some tenths of a second.
_MOST_STEPS_DEALT = 16


_MOST_ROWS_DEALT = 4096  # of these steps together, or one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Hold what a run is to do, whatever the strategy."""

    lengths: NDArray[np.int64]  # tokens of each row, in the order in which an epoch takes them
    effective_batch_size: int  # the most that a step has
    fixed_rows: int | None  # rows of each micro-batch, where the configuration says so; None: by length
    largest: bool  # the largest micro-batches instead of the fastest

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def epoch(self, costs: Costs, *, cap_bytes: int) -> Totals:
        """Partition an epoch's effective batches. Raises RowTooLongError."""
        return cut_totals(
            self.lengths,
            self.effective_batch_size,
            costs=costs,
            cap_bytes=cap_bytes,
            largest=self.largest,
            fixed_rows=self.fixed_rows,
        )

    def dealt(self, totals: Totals, costs: Costs, wire: Wire | None, *, cap_bytes: int) -> tuple[Totals, float | None]:
        """Return an epoch as the ranks make it, its seconds those of the longest; and the share in which they work.

        A few steps, evenly chosen, are dealt as the run deals them. Where weights are gathered for each micro-batch,
        ranks wait for each other in each round, and for what is sent beside it. wire: None: of one process.
        """
        if wire is None:
            return totals, None
        cutter: Cutter = by_costs(costs, cap_bytes=cap_bytes, largest=self.largest)
        if self.fixed_rows is not None:
            cutter = ByRows(max_rows=self.fixed_rows)
        longest_s = mean_s = alone_s = 0.0
        num_dealt = num_alone = 0
        for lengths in self._some_steps():
            alone, dealt = (
                cutter.cut(lengths),
                deal(cutter, lengths, ranks=wire.num_ranks, in_lockstep=wire.round_bytes > 0),
            )
            passes = [[_seconds_of(each, costs) for each in mine] for mine in dealt]
            num_dealt, num_alone = num_dealt + sum(map(len, dealt)), num_alone + len(alone)
            alone_s += sum(_seconds_of(each, costs) for each in alone)
            mean_s += sum(map(sum, passes)) / wire.num_ranks
            longest_s += _in_rounds(passes, wire) if wire.round_bytes else max(map(sum, passes))
        on_ranks = replace(
            totals,
            num_micro_batches=round(totals.num_micro_batches * num_dealt / num_alone),
            seconds=totals.seconds * longest_s / alone_s,
        )
        return on_ranks, mean_s / longest_s

    def _some_steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the lengths of the rows of a few steps."""
        size, every = self.effective_batch_size, max(len(self.lengths) // self.effective_batch_size, 1)
        most = min(every, _MOST_STEPS_DEALT, max(_MOST_ROWS_DEALT // size, 1))
        for number in np.arange(most) * every // most:
            yield self.lengths[number * size : (number + 1) * size]

    def recut(self, taken: Candidate, before: Costs, now: Costs, *, cap_bytes: int) -> Candidate:
        """Return a candidate that fits, once the device has shown other costs or another cap. before: its costs."""
        assert taken.seconds_per_epoch is not None, "it fits"
        assert taken.total_bytes is not None, "it fits"
        had, alone = self.epoch(before, cap_bytes=taken.cap_bytes), self.epoch(now, cap_bytes=cap_bytes)
        more_bytes = alone.widest.peak_bytes - had.widest.peak_bytes
        had_s = self.dealt(had, before, taken.wire, cap_bytes=taken.cap_bytes)[0].seconds
        totals, busy_share = self.dealt(alone, now, taken.wire, cap_bytes=cap_bytes)
        alone_s = taken.seconds_per_epoch_alone
        return replace(
            taken,
            **_partition_of(totals),
            total_bytes=max(taken.total_bytes + more_bytes, taken.single_row_bytes),
            cap_bytes=cap_bytes,
            cap_binds=self.epoch(now, cap_bytes=_NO_CAP).widest.peak_bytes > cap_bytes,
            seconds_per_epoch=taken.seconds_per_epoch + (totals.seconds - had_s),
            busy_share=busy_share,
            seconds_per_epoch_alone=None if alone_s is None else alone_s + (alone.seconds - had.seconds),
        )


def _seconds_of(part: MicroBatch, costs: Costs) -> float:
    return float(costs.seconds(part.num_rows, part.padded_length)) if part.seconds is None else part.seconds


def _in_rounds(passes: Sequence[Sequence[float]], wire: Wire) -> float:
    """Return the seconds of rounds in which each rank has one micro-batch, the longest first."""
    longest_first = sorted((seconds for mine in passes for seconds in mine), reverse=True)
    return sum(max(seconds, wire.round_s) for seconds in longest_first[:: wire.num_ranks])


def _partition_of(totals: Totals) -> dict[str, Any]:
    """Return the fields of a candidate that describe its partition."""
    return {
        "widest": (totals.widest.rows, totals.widest.padded_length),
        "micro_batches_per_step": totals.num_micro_batches / totals.num_steps,
        "padding": totals.padded_tokens / totals.real_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCosts:
    """Hold all that is known of one strategy before the data is partitioned."""

    way: Way
    costs: Costs
    least_bytes: int  # allocated whatever the rows are: in the optimizer's own step, or while the weights are loaded
    state_bytes: int  # of the optimizer
    saved_bytes: int  # of a checkpoint
    update_s: float  # of the optimizer's own step, of all weights
    overhead_bytes: Callable[[Sequence[Shape]], int]  # reserved beyond allocated, after steps of these shapes
    bound_by: Callable[[Sequence[Shape]], BoundBy]
    advice: Callable[[Sequence[Shape]], tuple[str, ...]]  # on what would make it faster
    traced_at: Callable[[int, int], Costs]  # the costs once one more shape, (rows, tokens), has been traced
    wire: Wire | None = None  # None: of one process
    traces: Traces | None = None  # that tell all this; None: made otherwise
    host: Host | None = None  # None: all is on the device


def candidate(known: WayCosts, task: Task, budget: Budget) -> Candidate:
    """Return a strategy with its cap, its partition of an epoch and what that costs; or why it does not fit."""
    cap = _settled(known, task, budget)
    reason = _misfit(known, task, cap)
    if cap.totals is None or reason is not None:
        return _unfit(known, task, budget, cap, reason or "")
    alone, wire, update_s = cap.totals, known.wire, known.update_s
    totals, busy_share = task.dealt(alone, known.costs, wire, cap_bytes=cap.num_bytes)
    if wire is not None:
        update_s = wire.update_s + update_s / (wire.num_ranks if known.way.is_sharded else 1)
    widest = totals.widest
    total_bytes = max(widest.peak_bytes, known.least_bytes) + budget.limit_bytes - budget.margin_bytes - cap.num_bytes
    return Candidate(
        way=known.way,
        fits=True,
        reason=f"its largest micro-batch, {_in_words(widest, known)}, makes {format_bytes(total_bytes)} in all",
        single_row_bytes=_alone_in_all(known, task, budget, cap),
        total_bytes=total_bytes,
        cap_bytes=cap.num_bytes,
        cap_binds=cap.binds,
        **_partition_of(totals),
        seconds_per_epoch=totals.seconds + update_s * totals.num_steps,
        bound_by=known.bound_by(_shapes(totals)),
        longest_that_fits=task.longest,
        advice=known.advice(_shapes(totals)),
        update_s=update_s,
        wire=wire,
        host=known.host,
        busy_share=busy_share,
        seconds_per_epoch_alone=None if wire is None else alone.seconds + known.update_s * alone.num_steps,
    )


def verified_strategy(known: WayCosts, task: Task, budget: Budget) -> tuple[WayCosts, Candidate]:
    """Return the candidate; where its cap binds, after a trace of its widest micro-batch, which decides.

    Between traces a peak is predicted from above, so that a little room can be lost; or, rarely, from below.
    """
    found = candidate(known, task, budget)
    if found.widest is None or not found.cap_binds:
        return known, found
    known = replace(known, costs=known.traced_at(*found.widest))
    return known, candidate(known, task, budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cap:
    num_bytes: int  # allocated
    totals: Totals | None  # None: the longest row does not fit alone
    binds: bool  # without it the partition would be another


def _settled(known: WayCosts, task: Task, budget: Budget) -> _Cap:
    """Return a cap that leaves the allocator what it needs for the micro-batches that this very cap gives."""
    alone_bytes = float(known.costs.peak_bytes(1, task.longest))
    cap_bytes = _left_bytes(known, budget, 1, task.longest)
    if alone_bytes > cap_bytes:
        return _Cap(num_bytes=cap_bytes, totals=None, binds=True)
    free = task.epoch(known.costs, cap_bytes=_NO_CAP)
    loose_bytes = min(cap_bytes, budget.reserved_bytes - known.overhead_bytes(_shapes(free)))
    if free.widest.peak_bytes <= loose_bytes or task.fixed_rows is not None:
        return _Cap(num_bytes=loose_bytes, totals=free, binds=free.widest.peak_bytes > loose_bytes)
    for _ in range(_MOST_ROUNDS):
        totals = task.epoch(known.costs, cap_bytes=cap_bytes)
        left_bytes = budget.reserved_bytes - known.overhead_bytes(_shapes(totals))
        if left_bytes >= cap_bytes:
            return _Cap(num_bytes=cap_bytes, totals=totals, binds=True)
        cap_bytes = left_bytes
        if alone_bytes > cap_bytes:
            return _Cap(num_bytes=cap_bytes, totals=None, binds=True)
    return _Cap(num_bytes=cap_bytes, totals=task.epoch(known.costs, cap_bytes=cap_bytes), binds=True)


def _misfit(known: WayCosts, task: Task, cap: _Cap) -> str | None:
    there = f"{format_bytes(max(cap.num_bytes, 0))} are available"
    # What is left for a fixed number of rows depends on them: where they are too many, that is the reason.
    if known.least_bytes > cap.num_bytes and (cap.totals is None or task.fixed_rows is None):
        return f"weights and optimizer alone take {format_bytes(known.least_bytes)}, {there}"
    if cap.totals is None:
        alone_bytes = int(known.costs.peak_bytes(1, task.longest))
        return f"the longest row, {format_count(task.longest, 'token')}, takes {format_bytes(alone_bytes)}, {there}"
    widest = cap.totals.widest
    if widest.peak_bytes > cap.num_bytes:
        return f"{_in_words(widest, known)} take {format_bytes(widest.peak_bytes)}, {there}"
    return None


def _in_words(shape: MicroBatchShape, known: WayCosts) -> str:
    return shape_in_words(shape.rows, shape.padded_length, is_packed=known.costs.is_packed)


def _unfit(known: WayCosts, task: Task, budget: Budget, cap: _Cap, reason: str) -> Candidate:
    alone = cap if task.fixed_rows is None else replace(cap, num_bytes=_left_bytes(known, budget, 1, task.longest))
    return Candidate(
        way=known.way,
        fits=False,
        reason=reason,
        wire=known.wire,
        host=known.host,
        single_row_bytes=_alone_in_all(known, task, budget, alone),
        cap_bytes=cap.num_bytes,
        cap_binds=True,
        too_long=tuple(int(row) for row in np.flatnonzero(known.costs.peak_bytes(1, task.lengths) > alone.num_bytes)),
        longest_that_fits=_longest_that_fits(known, task, budget, cap) or None,
    )


def _longest_that_fits(known: WayCosts, task: Task, budget: Budget, cap: _Cap) -> int:
    """Return the tokens of a row that fits, alone or, where the configuration says so, with others as long; 0: none."""
    if task.fixed_rows is None:
        return known.costs.longest_row_that_fits(cap.num_bytes, up_to=task.longest)
    rows, left_bytes = task.fixed_rows, _left_bytes(known, budget, 1, task.longest)
    for _ in range(_MOST_ROUNDS):
        tokens = known.costs.longest_row_that_fits(left_bytes, rows=rows, up_to=task.longest)
        if tokens == 0:
            return 0
        left_bytes = _left_bytes(known, budget, rows, tokens)
        if max(float(known.costs.peak_bytes(rows, tokens)), known.least_bytes) <= left_bytes:
            return tokens
    return 0


def _left_bytes(known: WayCosts, budget: Budget, rows: int, tokens: int) -> int:
    """Return what such micro-batches may allocate."""
    return budget.reserved_bytes - known.overhead_bytes([(rows, tokens)])


def _alone_in_all(known: WayCosts, task: Task, budget: Budget, cap: _Cap) -> int:
    """Return the bytes of the longest row alone, with what is outside PyTorch and what its allocator holds beyond."""
    peak_bytes = max(int(known.costs.peak_bytes(1, task.longest)), known.least_bytes)
    return peak_bytes + budget.limit_bytes - budget.margin_bytes - cap.num_bytes


def _shapes(totals: Totals) -> list[Shape]:
    return [(shape.rows, shape.padded_length) for shape in totals.shapes]


# In the order of preference: recomputing costs time and saves memory, whole logits take memory and save none.
WAYS = (
    Way(gradient_checkpointing=False, chunked_loss=True),
    Way(gradient_checkpointing=False, chunked_loss=False),
    Way(gradient_checkpointing=True, chunked_loss=True),
    Way(gradient_checkpointing=True, chunked_loss=False),
)


WORTH = 0.02  # a later strategy must be faster by this share: times are not known better


def ways(
    *,
    checkpointing: int | Literal["auto"],
    chunked: bool | Literal["auto"],
    sharded: Sequence[bool] = (False,),
    offload: Offload = "none",
) -> list[Way]:
    """Return the strategies that the configuration leaves open, best first. sharded: as they may be, best first.

    checkpointing: of so many layers, where it is a number; where it is open, `some_layers` says of how many.
    """
    of = (False, True) if checkpointing == "auto" else (checkpointing, checkpointing)
    return [
        replace(way, gradient_checkpointing=of[way.gradient_checkpointing], is_sharded=is_sharded, offload=offload)
        for is_sharded in sharded
        for way in WAYS
        if checkpointing == "auto" or way.gradient_checkpointing == bool(checkpointing)
        if chunked in ("auto", way.chunked_loss)
    ]


_MOST_TRIED = 5  # numbers of layers whose partition is looked at, from the fewest that fit on


def some_layers(
    off: WayCosts, on: WayCosts, task: Task, budget: Budget, *, num_layers: int, cap_bytes: int
) -> Candidate | None:
    """Return what recomputing the best number of first layers would cost, as far as none and all of them tell.

    Each layer costs the same time. The peak falls by what a layer keeps until it is that of all layers, which is at
    most a straight line between none and all. None: no number fits. cap_bytes: of the partition of `on`, from which
    what the allocator needs is taken.
    """

    def costs(number: int) -> Costs:
        share = number / num_layers
        peak, time = (getattr(off.costs, name).toward(getattr(on.costs, name), share) for name in ("peak", "time"))
        return replace(on.costs, peak=peak, time=time)

    def is_over(number: int) -> bool:
        return float(costs(number).peak_bytes(task.fixed_rows or 1, task.longest)) > cap_bytes

    fewest = 2 + bisect_left(range(2, num_layers), True, key=lambda number: not is_over(number))
    between = replace(on, overhead_bytes=lambda shapes: budget.reserved_bytes - cap_bytes)
    fitting: list[Candidate] = []
    for number in dict.fromkeys(np.linspace(fewest, num_layers - 1, _MOST_TRIED).astype(int).tolist()):
        if number >= num_layers:
            break
        way = replace(on.way, gradient_checkpointing=number)
        found = candidate(replace(between, way=way, costs=costs(number)), task, budget)
        fitting += [found] * found.fits
        if found.fits and not found.cap_binds:
            break  # more layers would only cost time
    return min(fitting, key=lambda each: each.seconds_per_epoch or math.inf, default=None)


def could_gain_by_sharding(known: Sequence[WayCosts], candidates: Sequence[Candidate], task: Task) -> bool:
    """Return whether sharding could be faster than replicated strategies, known and found, by enough to look at it.

    At best it has the room for any cut, sends nothing, and divides the optimizer's step by the ranks.
    """
    fitting = [each.seconds_per_epoch for each in candidates if each.seconds_per_epoch is not None]
    if not fitting:
        return True
    least_s = math.inf
    for each in known:
        assert each.wire is not None, "one process has nothing to shard over"
        totals, _ = task.dealt(task.epoch(each.costs, cap_bytes=_NO_CAP), each.costs, each.wire, cap_bytes=_NO_CAP)
        least_s = min(least_s, totals.seconds + each.update_s / each.wire.num_ranks * totals.num_steps)
    return least_s < min(fitting) * (1 - WORTH)


def choose(candidates: Sequence[Candidate], *, has_more: bool = False) -> tuple[Candidate | None, str]:
    """Return the fastest that fits, and why; of several as fast as each other the one that is preferred.

    candidates: in the order of preference. None where none fits. has_more: there are further strategies, which are not
    looked at, since the last of these would not be faster with more memory.
    """
    best: Candidate | None = None
    least_s = math.inf
    for each in candidates:
        if each.seconds_per_epoch is not None and each.seconds_per_epoch < least_s * (1 - WORTH):
            best, least_s = each, each.seconds_per_epoch
    if best is None:
        return None, "; ".join(f"{each.way}: {each.reason}" for each in candidates)
    return best, _why(best, candidates, has_more=has_more)


def _why(best: Candidate, candidates: Sequence[Candidate], *, has_more: bool) -> str:
    others = [each for each in candidates if each is not best]
    fitting = [(each.seconds_per_epoch, each.way) for each in others if each.seconds_per_epoch is not None]
    if not others:
        return (
            "it fits, and more memory would not make updates of this size faster"
            if has_more
            else "the only strategy that is left open"
        )
    if not fitting:
        return f"the only strategy that fits: {others[0].reason}"
    assert best.seconds_per_epoch is not None, "it fits"
    second_s, way = min(fitting, key=lambda each: each[0])
    tie = ", a difference too small to tell" if second_s < best.seconds_per_epoch else ""
    return f"an epoch takes {format_seconds(best.seconds_per_epoch)}, {way} {format_seconds(second_s)}{tie}"


def rows_of_shape(lengths: NDArray[np.int64], *, rows: int, tokens: int) -> NDArray[np.intp]:
    """Return the positions of `rows` rows of at most `tokens` tokens, the longest of them, so that padding is least.

    lengths: tokens of each row of the data. A row is taken more than once where there are too few.
    """
    short_enough = np.flatnonzero(lengths <= tokens)
    assert len(short_enough), "a shape of the data has a row of its length"
    order = short_enough[np.argsort(-lengths[short_enough], kind="stable")]
    return np.resize(order, rows).astype(np.intp)


def rows_of_pack(lengths: NDArray[np.int64], *, rows: int, tokens: int) -> NDArray[np.intp]:
    """Return the positions of rows that have, packed, about as many tokens as `rows` rows of `tokens` tokens.

    None is longer where there are such rows, and the sum is less by less than the shortest row. A row is taken more
    than once where there are too few.
    """
    order = np.argsort(lengths, kind="stable")
    ascending, left = lengths[order], max(rows * tokens, int(lengths.min()))
    longest, taken = max(tokens, int(ascending[0])), []
    while left >= ascending[0]:
        taken.append(np.searchsorted(ascending, min(left, longest), side="right") - 1)
        left -= int(ascending[taken[-1]])
    return order[taken]
