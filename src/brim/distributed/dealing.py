"""Stand in until dealing is there."""

from __future__ import annotations

from numpy.typing import ArrayLike

from brim.batching import Cutter, MicroBatch


def deal(cutter: Cutter, lengths: ArrayLike, *, ranks: int, num_groups: int | None = None) -> list[list[MicroBatch]]:
    """Deal."""
    cut = cutter.cut(lengths) if num_groups is None else cutter.cut_in_order(lengths, num_groups=num_groups)
    if ranks == 1:
        return [cut]
    work = [0.0] * ranks
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for batch in sorted(cut, key=lambda b: -(b.num_rows * b.padded_length)):
        to = work.index(min(work))
        dealt[to].append(batch)
        work[to] += batch.num_rows * batch.padded_length
    return dealt
