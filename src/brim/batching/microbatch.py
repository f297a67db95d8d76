"""Partition one effective batch into micro-batches, under a limit that moves within the run.

`ByLength` takes as many rows together as cost the least time under a cap in bytes; `ByRows` takes a fixed number of
rows. `Cap` is the limit of either: it is lowered when memory runs out and raised again after clean steps. The state
of a `Cutter` goes into the checkpoint, and `cutter_of` restores it. Groups of neighbours in the
batch's own order are for measurements that ask for random groups of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.bins import PackedCosts, fewest_bins
from brim.batching.costs import Costs
from brim.batching.partition import MOST_ROWS_FOR_ALL_PAIRS, Terms, borders


def cutter_of(state: Mapping[str, Any]) -> Cutter:
    """Return the cutter whose `state` this is, as it was then."""
    is_by_rows = state["kind"] == ByRows.kind
    cutter = ByRows(max_rows=1) if is_by_rows else by_costs(Costs.from_dict(state["costs"]), cap_bytes=0)
    cutter.restore(state)
    return cutter


def by_costs(costs: Costs, *, cap_bytes: int, largest: bool = False) -> ByLength:
    """Return what partitions rows by these costs, padded or packed, under a cap on allocated bytes."""
    kind = Packed if costs.is_packed else ByLength
    return kind(costs=costs, cap_bytes=cap_bytes, largest=largest)


# How much of a rank's seconds a micro-batch may take, in one of the cuts to be dealt. Ten times as many shares gain a
# percent or two (benchmarks/dealing.py shows what these reach).
_SHARES = (0.12, 0.15, 0.18, 0.21, 0.25, 0.29, 0.34, 0.4, 0.46, 0.53, 0.61, 0.7, 0.8, 0.91, 1.04, 1.2)


# The share of the bytes that the shape adds which is left after memory ran out. Two such steps leave less than a half,
# so that a memory model that is off by a factor of two is corrected by the second.
_NOTCH = 0.7


class Cutter(ABC):
    """Partition effective batches, equally for equal calls, under a limit. Its state goes into the checkpoint.

    The limit falls where memory runs out, and rises again after clean steps.
    """

    kind: str
    _cap: Cap
    unit: str  # of what the limit counts: bytes, or rows

    @property
    def limit(self) -> int:
        """Return what a micro-batch gets at most, in `unit`."""
        return self._cap.now

    @abstractmethod
    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """Take every row of an effective batch once, none over the cap. lengths: tokens of each row.

        A row that is over the cap alone is a micro-batch by itself: such rows are refused before a run is launched,
        and one that is left over after the cap was lowered is tried.
        """

    @abstractmethod
    def cuts(self, lengths: ArrayLike, *, ranks: int) -> list[list[MicroBatch]]:
        """Return partitions under the same limit, the best of which can be dealt evenly to so many ranks, two or more.

        Where the time of a micro-batch follows from its shape in more ways than by its tokens, they are several.
        """

    def cut_in_order(self, lengths: ArrayLike, *, num_groups: int) -> list[MicroBatch]:
        """Take every row once, in order: about `num_groups` micro-batches, more where the cap asks for it.

        Rows of a batch are in random order, so that these are random groups of them, which neighbours in length are
        not. As in `cut`, a row that is over the cap alone is a micro-batch by itself. num_groups: at least 1; those
        that fit are of equal size, and of one row where there are no more rows than groups.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        bounds = [0]
        while bounds[-1] < len(tokens):
            rows_left, groups_left = len(tokens) - bounds[-1], max(1, num_groups + 1 - len(bounds))
            bounds.append(bounds[-1] + self._together(tokens[bounds[-1] :], most=-(-rows_left // groups_left)))
        return self._formed(np.arange(len(tokens)), tokens, bounds) if len(tokens) else []

    def lower(self, failed: MicroBatch) -> CapChange | None:
        """Cut smaller from now on, since this micro-batch ran out of memory. None where it is a single row."""
        return None if failed.num_rows == 1 else self._change(self._lowered(failed))

    def clean_step(self) -> CapChange | None:
        """Count a step that went well; after enough of them in a row raise the limit, up to its value at launch."""
        return self._change(self._cap.after_clean_step())

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to cut the same, as JSON."""
        return {"kind": self.kind, "cap": asdict(self._cap)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        assert state["kind"] == self.kind, "the state of another cutter"
        self._cap = Cap.from_dict(state["cap"])

    def _change(self, cap: Cap) -> CapChange | None:
        before, self._cap = self._cap, cap
        return None if before.now == cap.now else CapChange(before=before.now, after=cap.now, unit=self.unit)

    @abstractmethod
    def _together(self, tokens: NDArray[np.int64], most: int) -> int:
        """Count the first rows that fit together, as any fewer of them do: at most `most`, at least 1."""

    @abstractmethod
    def _lowered(self, failed: MicroBatch) -> Cap:
        """Return the limit after a micro-batch of several rows ran out of memory."""

    @abstractmethod
    def _formed(self, order: NDArray[np.intp], tokens: NDArray[np.int64], bounds: Sequence[int]) -> list[MicroBatch]:
        """Return the rows in this order, divided at these bounds (from 0 to their number).

        tokens: of each row, by its position in the effective batch.
        """


class ByLength(Cutter):
    """Partition by predicted costs. Its costs are those of the launch, also in a resumed run."""

    kind, unit = "by_length", "bytes"

    def __init__(self, *, costs: Costs, cap_bytes: int, most_rows: int | None = None, largest: bool = False) -> None:
        """Begin with a cap on the allocated bytes of a micro-batch. most_rows: at most so many together.

        largest: form the fewest micro-batches, not the quickest (see cut).
        """
        self._costs = costs
        self._cap = Cap(now=cap_bytes)
        self._most_rows = most_rows
        self._largest = largest

    @property
    def cap_bytes(self) -> int:
        """Return the cap as it is now."""
        return self._cap.now

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """Take every row once, none over the cap that fits alone, in the least predicted time; the longest rows first.

        Where the largest are asked for, the fewest micro-batches instead, and of these partitions the one with the
        least padding.

        Both predictions depend on (rows, longest row) alone and do not fall as the longest row grows, so some cheapest
        partition goes along the order of length: any other can be rearranged to it without a dearer micro-batch. It is
        found by dynamic programming, exact for any costs up to MOST_ROWS_FOR_ALL_PAIRS rows (partition.py); beyond
        them it takes O(n log n) and is exact for times that are convex in the padded tokens, with slopes that do not
        fall with the length, and a peak that does not fall with the length. Equal input gives equal partitions.
        """
        return self._cut(np.asarray(lengths, dtype=np.int64))[0]

    def cuts(self, lengths: ArrayLike, *, ranks: int) -> list[list[MicroBatch]]:
        """Return the cut, and the best ones whose micro-batches take at most a share of a rank's seconds."""
        tokens = np.asarray(lengths, dtype=np.int64)
        (quickest,) = self._cut(tokens)
        more = max(0, ranks - len(quickest))  # without which a rank is idle
        seconds = math.fsum(part.seconds or 0.0 for part in quickest) + more * self._costs.time.base
        shares = _SHARES[:: max(1, len(tokens) // MOST_ROWS_FOR_ALL_PAIRS)]  # they are more work, and matter less
        return [quickest, *self._cut(tokens, limits=[share * seconds / ranks for share in shares])]

    def _cut(self, tokens: NDArray[np.int64], *, limits: Sequence[float] = (math.inf,)) -> list[list[MicroBatch]]:
        """Cut under each limit on the seconds of a micro-batch of several rows; cuts that are equal once."""
        if not len(tokens):
            return [[]]
        terms = Terms(
            costs=self._costs,
            cap_bytes=self._cap.now,
            most_rows=self._most_rows,
            largest=self._largest,
            lone_rows_may_exceed=True,
        )
        order = longest_first(tokens)
        found = dict.fromkeys(map(tuple, borders(terms, tokens[order], limits=limits)))
        # Formed in one go: arrays are as dear for one cut as for all.
        bounds = [number * len(tokens) + bound for number, each in enumerate(found) for bound in each[:-1]]
        formed = iter(self._formed(np.tile(order, len(found)), tokens, [*bounds, len(found) * len(tokens)]))
        return [list(islice(formed, len(each) - 1)) for each in found]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        own = {"costs": asdict(self._costs), "most_rows": self._most_rows, "largest": self._largest}
        return {**super().state(), **own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        super().restore(state)
        self._costs = Costs.from_dict(state["costs"])
        self._most_rows, self._largest = state["most_rows"], state["largest"]

    def _lowered(self, failed: MicroBatch) -> Cap:
        assert failed.peak_bytes is not None, "a micro-batch of another cutter"
        static_bytes = self._costs.static_bytes
        added_bytes = min(self._cap.now, failed.peak_bytes) - static_bytes
        to = min(static_bytes + int(_NOTCH * added_bytes), failed.peak_bytes - 1)
        return self._cap.lowered(to, failed=failed.peak_bytes)

    def _together(self, tokens: NDArray[np.int64], most: int) -> int:
        padded = np.maximum.accumulate(tokens[: most if self._most_rows is None else min(most, self._most_rows)])
        over = self._costs.peak_bytes(np.arange(1, len(padded) + 1), padded) > self._cap.now
        return max(1, int(over.argmax()) if over.any() else len(padded))

    def _formed(self, order: NDArray[np.intp], tokens: NDArray[np.int64], bounds: Sequence[int]) -> list[MicroBatch]:
        begins, num_rows = np.array(bounds[:-1]), np.diff(bounds)
        padded = np.maximum.reduceat(tokens[order], begins)
        peaks, seconds = np.ceil(self._costs.peak_bytes(num_rows, padded)), self._costs.seconds(num_rows, padded)
        return [
            MicroBatch(
                rows=order[begin : begin + rows],
                padded_length=int(padded_length),
                peak_bytes=int(peak),
                seconds=float(second),
            )
            for begin, rows, padded_length, peak, second in zip(begins, num_rows, padded, peaks, seconds, strict=True)
        ]


class Packed(ByLength):
    """Partition rows that are packed: the fewest micro-batches, as even as can be (see brim.batching.bins)."""

    kind = "packed"

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """Take every row once, none over the cap that fits alone; the one with the longest row first."""
        return self.cuts(lengths, ranks=1)[0]

    def cuts(self, lengths: ArrayLike, *, ranks: int) -> list[list[MicroBatch]]:
        """Return the fewest micro-batches that are a multiple of the ranks, as even as can be."""
        tokens = np.asarray(lengths, dtype=np.int64)
        if not len(tokens):
            return [[]]
        order = longest_first(tokens)
        longest, kinds = np.unique(tokens[order], return_inverse=True)
        capacities = np.maximum(self._packed.capacities(longest, most=int(tokens.sum())), longest)[kinds]
        bins = fewest_bins(tokens[order].tolist(), capacities.tolist(), ranks=ranks)
        return [self._micro_batches([np.sort(order[each]) for each in bins], tokens)]

    @property
    def _packed(self) -> PackedCosts:
        return PackedCosts(costs=self._costs, cap_bytes=self._cap.now)

    def _together(self, tokens: NDArray[np.int64], most: int) -> int:
        longest, sums = np.maximum.accumulate(tokens[:most]), np.cumsum(tokens[:most])
        over = self._packed.peak_bytes(sums, longest) > self._cap.now
        return max(1, int(over.argmax()) if over.any() else len(sums))

    def _formed(self, order: NDArray[np.intp], tokens: NDArray[np.int64], bounds: Sequence[int]) -> list[MicroBatch]:
        return self._micro_batches([order[start:stop] for start, stop in pairwise(bounds)], tokens)

    def _micro_batches(self, parts: Sequence[NDArray[np.intp]], tokens: NDArray[np.int64]) -> list[MicroBatch]:
        sums = np.array([tokens[rows].sum() for rows in parts])
        longest = np.array([tokens[rows].max() for rows in parts])
        squares = np.array([(tokens[rows] ** 2).sum() for rows in parts])
        peaks, seconds = self._packed.peak_bytes(sums, longest), self._packed.seconds(sums, squares)
        return [
            MicroBatch(rows=rows, padded_length=int(length), peak_bytes=int(peak), seconds=float(second))
            for rows, length, peak, second in zip(parts, longest, peaks, seconds, strict=True)
        ]


class ByRows(Cutter):
    """Take a fixed number of neighbours in length, the longest first; half as many once memory ran out."""

    kind, unit = "by_rows", "rows"

    def __init__(self, *, max_rows: int) -> None:
        self._cap = Cap(now=max_rows)

    @property
    def max_rows(self) -> int:
        """Return the limit as it is now."""
        return self._cap.now

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """Take every row once."""
        tokens = np.asarray(lengths, dtype=np.int64)
        cuts = cut_by_rows(tokens, max_rows=self._cap.now)
        return [MicroBatch(rows=rows, padded_length=int(tokens[rows[0]])) for rows in cuts]

    def cuts(self, lengths: ArrayLike, *, ranks: int) -> list[list[MicroBatch]]:
        """Return the fewest micro-batches that are a multiple of the ranks, with as many rows each, or one more."""
        tokens = np.asarray(lengths, dtype=np.int64)
        num_rounds = -(-len(tokens) // (self._cap.now * ranks))
        number = min(num_rounds * ranks, len(tokens))
        bounds = [len(tokens) * each // number for each in range(number + 1)] if number else [0]
        return [self._formed(longest_first(tokens), tokens, bounds)]

    def _lowered(self, failed: MicroBatch) -> Cap:
        return self._cap.lowered(failed.num_rows // 2, failed=failed.num_rows)

    def _together(self, tokens: NDArray[np.int64], most: int) -> int:
        return min(most, self._cap.now)

    def _formed(self, order: NDArray[np.intp], tokens: NDArray[np.int64], bounds: Sequence[int]) -> list[MicroBatch]:
        parts = (order[start:stop] for start, stop in pairwise(bounds))
        return [MicroBatch(rows=rows, padded_length=int(tokens[rows].max())) for rows in parts]


FIRST_WAIT_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """Hold a limit in bytes or in rows. A lowering is undone, the last one first, after `wait_steps` clean steps.

    Each out-of-memory that follows a raise doubles the wait, so that in a run of n steps a limit that is too high is
    tried again about log2(n) times.
    """

    now: int
    before: tuple[int, ...] = ()  # what it was lowered from, the value at launch first
    raised_from: int | None = None  # after a raise: the limit before it, which had gone well
    num_clean_steps: int = 0  # since the last change
    wait_steps: int = FIRST_WAIT_STEPS

    def lowered(self, to: int, *, failed: int) -> Cap:
        """Lower it to `to`, below what failed; or back to what went well, where that is more."""
        assert to < failed, "a limit that does not exclude what failed would run out of memory again"
        wait_steps = self.wait_steps
        if self.raised_from is not None:
            wait_steps *= 2
            if self.raised_from < failed:
                to = max(to, self.raised_from)
        return Cap(now=to, before=(*self.before, self.now), wait_steps=wait_steps)

    def after_clean_step(self) -> Cap:
        """Count one more step that has gone well."""
        if not self.before:
            return self
        if self.num_clean_steps + 1 < self.wait_steps:
            return replace(self, num_clean_steps=self.num_clean_steps + 1)
        *before, now = self.before
        return Cap(now=now, before=tuple(before), raised_from=self.now, wait_steps=self.wait_steps)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cap:
        """Return the cap of which these are the fields (`asdict`), from JSON."""
        return cls(**{**saved, "before": tuple(saved["before"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class CapChange:
    """Say that the limit on micro-batches was lowered or raised. `unit` says what it counts: bytes, or rows."""

    before: int
    after: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Hold the rows that go through the model together."""

    rows: NDArray[np.intp]  # positions in the effective batch
    padded_length: int  # tokens of the longest row, to which the others are padded
    peak_bytes: int | None = None  # predicted; None: no prediction was asked
    seconds: float | None = None  # predicted

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def cut_by_rows(lengths: NDArray[np.integer], *, max_rows: int) -> Iterator[NDArray[np.intp]]:
    """Yield the positions of each micro-batch: every row once, at most `max_rows` together, neighbours in length.

    lengths: tokens of each row. The longest come first, so that a misfit shows at once. Since the loss is divided
    once by the tokens of the whole effective batch, the order changes padding and nothing else.
    """
    order = longest_first(lengths)
    for start in range(0, len(order), max_rows):
        yield order[start : start + max_rows]


def longest_first(lengths: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return positions by falling length; equal lengths stay in their order."""
    return np.argsort(-lengths, kind="stable")
