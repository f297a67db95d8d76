"""Predict how evenly ranks are busy: the dealt micro-batches of real effective batches, under a law of their time.

    python -m benchmarks.dealing

Rows: docstrings and code of the example's training modules, cut at the demo's 512 tokens and at 2,048. The law, made up
for this: a micro-batch takes 110 + N + N · T / 16,000 units of N padded tokens in rows of T, so that it has 90% of full
speed at 1,000 tokens; at most 4,096 tokens fit. No model runs, nothing is communicated, and no rank is slower than
foretold, so these are the most that dealing beforehand can reach. Times are CPU seconds of the dealing alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.batching_subject import token_lengths
from benchmarks.report import print_table, write_report
from benchmarks.subject import SEED, training_rows
from brim.batching import MULTIPLE, Costs, Cutter, MicroBatch, Surface, by_costs
from brim.distributed.dealing import SLOWER, busy_share, claimable, claimed_s, deal, lockstep

CASES = ((32, 2), (32, 4), (32, 8), (128, 4), (128, 8), (512, 8), (512, 32))  # effective batch, ranks
MOST_TOKENS = (512, 2048)
CAP_TOKENS = 4096
MOST_STEPS = 24
GOALS = {(32, 4): 0.93, (128, 8): 0.93}  # of the ideal, padded
GOALS_S = {(32, 4): 0.003, (512, 32): 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Hold means over steps. The ideal is the time of one rank over the number of ranks."""

    rows: Literal["padded", "packed"]
    most_tokens: int  # of a row
    effective_batch_size: int
    ranks: int
    num_steps: int
    of_ideal: float
    of_ideal_in_lockstep: float
    of_ideal_with_one_cut: float  # the micro-batches of one rank, dealt in the same way
    bound_by_longest_row: float  # which no way to deal exceeds
    busy: float  # what the ranks work of the longest
    of_ideal_one_slow: float  # one rank takes longer than foretold; the ideal is that of so much less to work with
    of_ideal_one_slow_claimed: float  # who is free takes the next micro-batch
    num_micro_batches: float  # of all ranks, a step
    cut_s: float  # median, of one rank
    deal_s: float  # median


def main() -> None:
    lengths = token_lengths([asdict(row) for row in training_rows()])
    found = [
        measure(lengths, rows=rows, most_tokens=most_tokens, size=size, ranks=ranks)
        for most_tokens in MOST_TOKENS
        for rows in ("padded", "packed")
        for size, ranks in CASES
    ]
    for most_tokens in MOST_TOKENS:
        _print([each for each in found if each.most_tokens == most_tokens], most_tokens)
    print(write_report("dealing", figures={"num_rows": len(lengths), "dealt": list(map(asdict, found))}, num_threads=1))


def measure(
    lengths: NDArray[np.int64], *, rows: Literal["padded", "packed"], most_tokens: int, size: int, ranks: int
) -> Dealt:
    """Deal effective batches of the rows, in one random order."""
    costs = made_up_costs(packed=rows == "packed")
    cutter = by_costs(costs, cap_bytes=CAP_TOKENS)
    steps = list(_steps(np.minimum(lengths, most_tokens), size))
    shares: list[dict[str, float]] = []
    seconds: list[tuple[float, float]] = []
    for step in steps:
        cut, cut_s = _timed(cutter, step, ranks=1)
        dealt, deal_s = _timed(cutter, step, ranks=ranks)
        rounds = lockstep(deal(cutter, step, ranks=ranks, in_lockstep=True), ranks)
        seconds.append((cut_s, deal_s))
        ideal = _longest(cut) / ranks
        ideal_one_slow = _longest(cut) / (ranks - 1 + 1 / SLOWER)
        shares.append(
            {
                "of_ideal": ideal / _longest(dealt),
                "of_ideal_in_lockstep": ideal
                / sum(max(_longest([[part]]) for part in each if part) for each in rounds),
                "of_ideal_with_one_cut": ideal / _longest(_one_cut(cut[0], ranks)),
                "bound_by_longest_row": min(1.0, ideal / float(costs.seconds(1, step.max()))),
                "busy": busy_share(dealt),
                "of_ideal_one_slow": ideal_one_slow / max(_longest(dealt), SLOWER * _longest(dealt[:1])),
                "of_ideal_one_slow_claimed": ideal_one_slow / claimed_s(claimable(cutter, step, ranks=ranks), ranks),
                "num_micro_batches": sum(map(len, dealt)),
            }
        )
    return Dealt(
        rows=rows,
        most_tokens=most_tokens,
        effective_batch_size=size,
        ranks=ranks,
        num_steps=len(steps),
        cut_s=median(each for each, _ in seconds),
        deal_s=median(each for _, each in seconds),
        **{name: mean(each[name] for each in shares) for name in shares[0]},
    )


def made_up_costs(*, packed: bool) -> Costs:
    """Return bytes that are tokens, and the law's units as seconds."""
    values = tuple((110 + CAP_TOKENS * (1 + length / 16_000),) for length in (1, 2048))
    time_of = Surface(base=110.0, lengths=(1, 2048), tokens=((CAP_TOKENS,),) * 2, values=values)
    peak = Surface(base=0.0, lengths=(1,), tokens=((CAP_TOKENS,),), values=((float(CAP_TOKENS),),))
    costs = Costs(peak=peak, static_bytes=0, time=time_of)
    return replace(costs, multiple=MULTIPLE) if packed else costs


def _steps(lengths: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    order = np.random.default_rng(SEED).permutation(len(lengths))
    for start in range(0, min(MOST_STEPS, len(lengths) // size) * size, size):
        yield lengths[order[start : start + size]]


def _timed(cutter: Cutter, step: NDArray[np.int64], *, ranks: int) -> tuple[list[list[MicroBatch]], float]:
    before = time.process_time()
    dealt = deal(cutter, step, ranks=ranks)
    return dealt, time.process_time() - before


def _one_cut(cut: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Deal this cut, longest first, written a second time."""
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for part in sorted(cut, key=lambda part: -(part.seconds or 0.0)):
        min(dealt, key=lambda parts: _longest([parts])).append(part)
    return dealt


def _longest(dealt: Sequence[Sequence[MicroBatch]]) -> float:
    return max(sum(part.seconds or 0.0 for part in parts) for parts in dealt)


def _print(found: Sequence[Dealt], most_tokens: int) -> None:
    columns = (
        "rows, effective batch, ranks", "of the ideal", "in lockstep", "one cut", "bound", "busy", "one slow",
        "claimed", "micro-batches", "cut", "deal",
    )  # fmt: skip
    lines = []
    for each in found:
        case = each.effective_batch_size, each.ranks
        at_2048 = each.rows == "padded" and most_tokens == MOST_TOKENS[-1]
        goal = f" (goal {GOALS[case]:.0%})" if at_2048 and case in GOALS else ""
        goal_s = f" (goal {1000 * GOALS_S[case]:.0f})" if at_2048 and case in GOALS_S else ""
        whole = (each.of_ideal_in_lockstep, each.of_ideal_with_one_cut, each.bound_by_longest_row, each.busy)
        shares = (*whole, each.of_ideal_one_slow, each.of_ideal_one_slow_claimed)
        lines.append(
            (
                f"{each.rows}, {each.effective_batch_size}, {each.ranks}",
                f"{each.of_ideal:.1%}{goal}",
                *(f"{share:.1%}" for share in shares),
                f"{each.num_micro_batches:.1f}",
                f"{1000 * each.cut_s:.2f} ms",
                f"{1000 * each.deal_s:.2f} ms{goal_s}",
            )
        )
    print_table(f"rows of {most_tokens} tokens at most", columns, lines)


if __name__ == "__main__":
    main()
