"""Measure the time of an epoch at one effective batch: brim untuned, against TRL's SFTTrainer tuned by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.batching_peers import Way, accumulation_of_packs
from benchmarks.batching_run import Outcome, RunFailed, Spec, run
from benchmarks.batching_subject import Subject
from benchmarks.subject import EFFECTIVE_BATCH_SIZE

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # rows that the hand search tries
PACKS = (1, 2, 4)
SEARCHED: tuple[Way, ...] = ("fixed", "group_by_length", "padding_free", "packing")
_UNTOUCHED_BYTES = 7 * 2**28  # that libraries and threads map and do not use: 1.7 GiB with TRL, before it trains
LIMITED = ", limited"  # ends the names of those who run under a limit
LOSS_GOAL = 1e-3  # relative, of each update's loss; what loss_equality.py holds brim and its peers to
GOALS: Mapping[str, float] = {"fixed": 1.0, "packing": 1.0, "auto_find": 5.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Hold one size of the hand search, on the first rows."""

    way: Way
    micro_batch_rows: int
    accumulation_steps: int
    tokens_per_s: float | None  # None: it failed
    peak_bytes: int | None = None  # of the process
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Hold the median of several epochs."""

    name: str
    micro_batch_rows: int | None
    train_s: float
    train_s_of_each: list[float]
    whole_s: float  # median, with reading, planning, loading and saving
    brim_is_faster: float  # median over the rounds of this one's time over brim's in the same round
    goal: float | None
    tokens_per_s: float
    padding: float  # padded over real tokens
    num_updates: int
    loss_difference: float | None  # the largest relative one of an update, from brim; None: its batches are others
    mean_loss: float  # over the epoch's updates
    held_out_loss: float | None
    peak_bytes: int  # largest

    @property
    def is_met(self) -> bool:
        """brim is as much faster as is asked for and, where the batches are the same, has the same losses."""
        has_same_losses = self.loss_difference is None or self.loss_difference <= LOSS_GOAL
        return has_same_losses and (self.goal is None or self.brim_is_faster >= self.goal)


def hand_search(subject: Subject, *, num_rows: int, num_threads: int, say: Callable[[str], None]) -> list[Trial]:
    """Try each kind with each size, once. num_rows: of the data set, the first ones."""
    lengths = [int(length) for length in subject.lengths()]
    trials = []
    for way in SEARCHED:
        for micro_batch, accumulation in _sizes(way, lengths):
            spec = Spec(
                folder=str(subject.folder), device=subject.device, contender=way, num_threads=num_threads,
                num_rows=num_rows, micro_batch_rows=micro_batch, accumulation_steps=accumulation,
            )  # fmt: skip
            trials.append(_try(spec, way))
            say(f"  {way}, {micro_batch} × {accumulation}: {trials[-1].tokens_per_s or 'failed'} tokens/s")
    return trials


def fastest(trials: Sequence[Trial], way: Way) -> Trial | None:
    """Return the fastest trial of this kind: the smaller micro-batch of two that are equal, None where all failed."""
    done = [trial for trial in trials if trial.way == way and trial.tokens_per_s is not None]
    return max(done, key=lambda trial: (trial.tokens_per_s or 0.0, -trial.micro_batch_rows), default=None)


def half_of_whole_batch(trials: Sequence[Trial]) -> int | None:
    """Return an address space in which the whole effective batch does not fit at once; None: it is not known."""
    whole = next((t for t in trials if t.way == "fixed" and t.micro_batch_rows == EFFECTIVE_BATCH_SIZE), None)
    if whole is None or whole.peak_bytes is None:
        return None
    return _UNTOUCHED_BYTES + whole.peak_bytes // 2


def race(
    specs: Mapping[str, Spec],
    *,
    rounds: int,
    once: Sequence[str] = (),
    say: Callable[[str], None],
    start: Callable[[Spec], Outcome] = run,
) -> dict[str, list[Outcome]]:
    """Run every contender once a round, in turn, each in a process of its own; every other round backwards.

    once: contenders that are run in one round alone.
    """
    names = list(specs)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            if name in once and number:
                continue
            # A score does not change from round to round.
            outcome = start(replace(specs[name], scores=number == 0))
            outcomes[name].append(outcome)
            say(f"  round {number + 1}, {name}: {outcome.train_s:.1f} s")
    return outcomes


def contenders(specs: Mapping[str, Spec], trials: Sequence[Trial]) -> dict[str, Spec]:
    """Return brim, specified under "brim", and each of the peer's strategies as the hand search found it best."""
    ours = specs["brim"]
    chosen = {"brim": ours}
    for way in SEARCHED:
        best = fastest(trials, way)
        if best is not None:
            chosen[way] = replace(
                ours, contender=way, micro_batch_rows=best.micro_batch_rows, accumulation_steps=best.accumulation_steps
            )
    chosen["auto_find"] = replace(
        ours, contender="auto_find", micro_batch_rows=EFFECTIVE_BATCH_SIZE, accumulation_steps=1
    )
    return chosen


def summarize(outcomes: Mapping[str, Sequence[Outcome]]) -> list[Contender]:
    """Medians. "brim" is what the others are compared with; under a limit, brim under the same."""
    found = []
    for name, runs in outcomes.items():
        ours = outcomes[f"brim{LIMITED}"] if name.endswith(LIMITED) else outcomes["brim"]
        found.append(_contender(name, list(runs), ours))
    return found


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative one of two sequences of equal length; infinite where one is no number."""
    assert len(losses) == len(reference), "different numbers of updates"
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def figures(trials: Sequence[Trial], found: Sequence[Contender]) -> dict[str, Any]:
    """Return the figures as JSON."""
    return {
        "hand_search": [asdict(trial) for trial in trials],
        "loss_goal": LOSS_GOAL,
        "contenders": [{**asdict(contender), "is_met": contender.is_met} for contender in found],
    }


def _sizes(way: Way, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(micro-batch, accumulation steps) to be tried."""
    if way == "packing":
        return [(packs, accumulation_of_packs(lengths, micro_batch_packs=packs)) for packs in PACKS]
    return [(rows, EFFECTIVE_BATCH_SIZE // rows) for rows in MICRO_BATCHES]


def _try(spec: Spec, way: Way) -> Trial:
    rate, peak_bytes, failure = None, None, None
    try:
        outcome = run(spec)
        rate, peak_bytes = round(outcome.num_tokens / outcome.train_s, 1), outcome.peak_bytes
    except RunFailed as error:
        failure = str(error)
    return Trial(
        way=way,
        micro_batch_rows=spec.micro_batch_rows,
        accumulation_steps=spec.accumulation_steps,
        tokens_per_s=rate,
        peak_bytes=peak_bytes,
        failure=failure,
    )


def _contender(name: str, runs: Sequence[Outcome], ours: Sequence[Outcome]) -> Contender:
    first = runs[0]
    train_s = median(run.train_s for run in runs)
    # A limit that makes auto_find take smaller batches makes it take more updates, which are not brim's.
    same_batches = name not in ("packing", "group_by_length") and len(first.losses) == len(ours[0].losses)
    return Contender(
        name=name,
        micro_batch_rows=first.micro_batch_rows,
        train_s=round(train_s, 3),
        train_s_of_each=[round(run.train_s, 3) for run in runs],
        whole_s=round(median(run.whole_s for run in runs), 3),
        brim_is_faster=round(median(a.train_s / b.train_s for a, b in zip(runs, ours, strict=False)), 3),
        goal=next((goal for way, goal in GOALS.items() if name.startswith(way)), None),
        tokens_per_s=round(first.num_tokens / train_s, 1),
        padding=round(first.num_padded_tokens / first.num_tokens, 4),
        num_updates=len(first.losses),
        loss_difference=largest_difference(first.losses, ours[0].losses) if same_batches else None,
        mean_loss=sum(first.losses) / len(first.losses),
        held_out_loss=first.held_out_loss,
        peak_bytes=max(run.peak_bytes for run in runs),
    )
