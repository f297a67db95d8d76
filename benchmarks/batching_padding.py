"""Compare the padding of brim's partitions with that of fixed micro-batches of the same peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.subject import EFFECTIVE_BATCH_SIZE, SEED
from brim.batching import ByLength, Costs
from brim.batching.microbatch import cut_by_rows
from brim.data.tokens import rows_of_step

FIXED_ROWS = (2, 4, 8, 16, 32)
GOAL = 0.5  # of the fixed cut's waste


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padded over real tokens of one epoch, under one cap. A waste is that figure less 1."""

    fixed_rows: int  # the most that fit with the longest row of the data
    cap_bytes: int  # what they take
    fixed: float  # rows in the order of training
    fixed_in_order_of_length: float  # rows of each effective batch sorted first
    brim: float  # least time
    brim_largest: float  # fewest micro-batches: use_maximum_batch_size
    brim_micro_batches_per_step: float
    fixed_micro_batches_per_step: float
    waste_over_fixed_waste: float
    goal: float = GOAL


def paddings(lengths: ArrayLike, costs: Costs, *, fixed_rows: Sequence[int] = FIXED_ROWS) -> list[Padding]:
    """Return one result for each fixed number of rows. lengths: tokens of each row, in the data's order."""
    tokens = np.asarray(lengths, dtype=np.int64)
    steps = _steps(tokens)
    return [_padding(tokens, steps, costs, rows) for rows in fixed_rows]


def _padding(tokens: NDArray[np.int64], steps: Sequence[NDArray[np.int64]], costs: Costs, rows: int) -> Padding:
    cap_bytes = int(np.ceil(costs.peak_bytes(rows, tokens.max())))
    fixed = [[step[start : start + rows] for start in range(0, len(step), rows)] for step in steps]
    in_order = [[step[positions] for positions in cut_by_rows(step, max_rows=rows)] for step in steps]
    cutters = (ByLength(costs=costs, cap_bytes=cap_bytes, largest=flag) for flag in (False, True))
    ours, largest = ([[step[part.rows] for part in cutter.cut(step)] for step in steps] for cutter in cutters)
    return Padding(
        fixed_rows=rows,
        cap_bytes=cap_bytes,
        fixed=round(padded_over_real(fixed), 4),
        fixed_in_order_of_length=round(padded_over_real(in_order), 4),
        brim=round(padded_over_real(ours), 4),
        brim_largest=round(padded_over_real(largest), 4),
        brim_micro_batches_per_step=round(sum(map(len, ours)) / len(steps), 2),
        fixed_micro_batches_per_step=round(sum(map(len, fixed)) / len(steps), 2),
        waste_over_fixed_waste=round((padded_over_real(ours) - 1) / (padded_over_real(fixed) - 1), 4),
    )


def padded_over_real(steps: Sequence[Sequence[NDArray[np.int64]]]) -> float:
    """Return padded over real tokens. steps: the micro-batches of each effective batch, as their rows' lengths."""
    micro_batches = [micro_batch for step in steps for micro_batch in step]
    padded = sum(len(micro_batch) * int(micro_batch.max()) for micro_batch in micro_batches)
    return padded / sum(int(micro_batch.sum()) for micro_batch in micro_batches)


def _steps(tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the lengths of each effective batch of the first epoch, in brim's order."""
    starts = range(0, len(tokens), EFFECTIVE_BATCH_SIZE)
    return [
        tokens[rows_of_step(num_rows=len(tokens), seed=SEED, consumed_samples=start, size=EFFECTIVE_BATCH_SIZE)[1]]
        for start in starts
    ]
