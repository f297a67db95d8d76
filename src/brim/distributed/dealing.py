"""Deal the micro-batches of an effective batch to ranks, so that none waits long for the others.

Every rank computes all of it by itself: it follows from the cutter's state and the rows' lengths alone, and no plan is
sent. Nothing here depends on a clock, a hash or the way in which an array is summed; of equal choices the first counts.

The gradient is a sum, which does not ask who added what. So what is looked for is the cut, and the way to deal it, by
which the rank that takes longest takes least. One GPU's quickest cut has few large micro-batches, which cannot be dealt
evenly; smaller ones can, and take more time in all. So the cutter offers several, and the one that is dealt best wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapreplace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Cutter, MicroBatch
from brim.distributed.ranks import Ranks

if TYPE_CHECKING:
    import torch

SLOWER = 1.25  # times as long as foretold: what a rank may take where micro-batches are claimed

_FINER = (1, 2)  # times as many ranks as there are, for which claimed micro-batches are cut


def deal(
    cutter: Cutter, lengths: ArrayLike, *, ranks: int, num_groups: int | None = None, in_lockstep: bool = False
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank: every row of the effective batch once.

    lengths: tokens of each row; micro-batches hold positions among them. One rank gets the cutter's own cut. Of several
    some may get nothing, where there are fewer rows than ranks, or where one long row takes as long as all others.
    num_groups: about as many micro-batches, of random rows (`Cutter.cut_in_order`), are drawn first, and then dealt.
    in_lockstep: ranks will wait for one another after each micro-batch, as the rounds of `lockstep` have them; else
    each runs its own in the order of the cut, and they meet at the step's end.

    The longest go first, each to the rank that has least work (LPT): the rank that takes longest takes at most
    4/3 − 1/(3 · ranks) of the least that this cut allows (Graham 1969, doi.org/10.1137/0117039).
    """
    if num_groups is not None:
        cuts = [cutter.cut_in_order(lengths, num_groups=num_groups)]
    else:
        cuts = [cutter.cut(lengths)] if ranks == 1 else cutter.cuts(lengths, ranks=ranks)
    if not in_lockstep:
        return min((_longest_first(cut, ranks) for cut in cuts), key=_longest)
    rounds = min((lockstep([cut], ranks) for cut in cuts), key=_longest_of_rounds)
    return [[part for parts in rounds if (part := parts[rank]) is not None] for rank in range(ranks)]


def lockstep(dealt: Sequence[Sequence[MicroBatch]], ranks: int) -> list[list[MicroBatch | None]]:
    """Return the rounds in which ranks run equally many micro-batches: [round][rank], None where one has a dummy.

    dealt: micro-batches of a step, from `deal` or not. Those of a round are neighbours in work, so that ranks wait for
    one another as little as can be; the longest is first, and only the last has dummies. One rank keeps its order.
    """
    together = [part for parts in dealt for part in parts]
    if ranks > 1:
        together = _by_work(together)
    parts = [*together, *[None] * (-len(together) % ranks)]
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def claimable(cutter: Cutter, lengths: ArrayLike, *, ranks: int) -> list[MicroBatch]:
    """Return micro-batches in the order in which ranks are to claim them: who is free takes the next, the longest left.

    They are cut so that all are done soonest where one of the ranks takes longer than foretold; so there are more of
    them than `deal` has. lengths: as there.
    """
    cuts = [cut for each in _FINER for cut in cutter.cuts(lengths, ranks=each * ranks)]
    return min(map(_by_work, cuts), key=lambda cut: claimed_s(cut, ranks))


def claimed_s(parts: Sequence[MicroBatch], ranks: int, *, slower: float = SLOWER) -> float:
    """Return the predicted seconds until all is done that is claimed in this order. slower: the first rank."""
    free = [(0.0, rank) for rank in range(ranks)]
    for part in parts:
        now, rank = free[0]
        heapreplace(free, (now + _work(part) * (1.0 if rank else slower), rank))
    return max(free)[0]


class Claims:
    """Take the next of a step's micro-batches when this rank is free; each is taken by one rank.

    lengths: tokens of each row of the effective batch. device: of this rank.
    """

    def __init__(self, cutter: Cutter, lengths: NDArray[np.integer], ranks: Ranks, device: torch.device) -> None:
        self.micro_batches = claimable(cutter, lengths, ranks=ranks.size)  # of all ranks
        self._cutter, self._lengths, self._limit, self._device = cutter, lengths, cutter.limit, device
        self._next_number = ranks.counter("claims")
        self._queued: list[torch.cuda.Event] = []

    def __call__(self) -> Sequence[MicroBatch]:
        """Return a micro-batch, cut as this rank's limit asks since memory ran out; nothing once all are taken."""
        if self._device.type == "cuda":
            import torch

            # It has one to do, and one waits: who queued them all would not be free
            self._queued.append(torch.cuda.current_stream().record_event())
            if len(self._queued) > 1:
                self._queued.pop(0).synchronize()
        number = self._next_number()
        if number >= len(self.micro_batches):
            return ()
        taken = self.micro_batches[number]
        if self._cutter.limit >= self._limit:
            return [taken]
        return [replace(each, rows=taken.rows[each.rows]) for each in self._cutter.cut(self._lengths[taken.rows])]


def _by_work(parts: Iterable[MicroBatch]) -> list[MicroBatch]:
    return sorted(parts, key=lambda part: (-_work(part), int(part.rows[0])))


def busy_share(dealt: Sequence[Sequence[MicroBatch]], *, in_lockstep: bool = False) -> float:
    """Predict in which share of a step's passes ranks work: their mean over the longest; 1.0 where all take none.

    dealt, in_lockstep: as `deal` has them.
    """
    longest = _longest_of_rounds(lockstep(dealt, len(dealt))) if in_lockstep else _longest(dealt)
    return math.fsum(map(_load, dealt)) / (len(dealt) * longest) if longest else 1.0


def _longest_first(cut: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    work = [_work(part) for part in cut]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # work, micro-batches: those without work are dealt evenly, too
    for number in sorted(range(len(cut)), key=lambda number: -work[number]):
        load, count, rank = loads[0]
        dealt[rank].append(number)
        heapreplace(loads, (load + work[number], count + 1, rank))
    return [[cut[number] for number in sorted(numbers)] for numbers in dealt]


def _longest(dealt: Sequence[Sequence[MicroBatch]]) -> float:
    return max(map(_load, dealt))


def _longest_of_rounds(rounds: Sequence[Sequence[MicroBatch | None]]) -> float:
    return math.fsum(_work(parts[0]) for parts in rounds if parts[0] is not None)


def _load(parts: Sequence[MicroBatch]) -> float:
    return math.fsum(map(_work, parts))


def _work(part: MicroBatch) -> float:
    """Return the predicted seconds; padded tokens where nothing was predicted, beside others of the same cut."""
    return part.num_rows * float(part.padded_length) if part.seconds is None else part.seconds
