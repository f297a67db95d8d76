"""Measure the rows a second of `brim predict` untuned, against transformers with the best batch of a hand search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.batching_run import RunFailed
from benchmarks.inference_peers import Way
from benchmarks.inference_run import Answer, Outcome, Spec, run
from benchmarks.inference_subject import quantiles

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # rows that the hand search tries
SEARCHED: tuple[Way, ...] = ("static", "by_length", "continuous")
ROW_BY_ROW = "row by row"
GOALS: Mapping[str, float] = {"static": 1.5, ROW_BY_ROW: 3.0, "continuous": 1.0}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Hold one size of the hand search, on the first rows."""

    way: Way
    batch_rows: int
    rows_per_s: float | None  # None: it failed
    peak_bytes: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Hold the median of several runs over all prompts."""

    name: str
    batch_rows: int | None  # None: brim's plan
    rows_per_s: float
    generate_s: float
    generate_s_of_each: list[float]
    whole_s: float
    brim_is_faster: float  # median over the rounds of this one's generate_s over brim's in the same round
    brim_is_faster_in_all: float  # the same of whole_s
    goal: float | None
    rows_equal: int  # to brim's: text, length and how it ended
    rows_cut: int  # that max_new_tokens ended
    peak_bytes: int  # largest

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.brim_is_faster >= self.goal


def hand_search(
    spec: Spec, *, num_rows: int, batches: Sequence[int] = BATCHES, say: Say, start: Callable[[Spec], Outcome] = run
) -> list[Trial]:
    """Try each kind with each size, once, on the first rows."""
    trials = []
    for way in SEARCHED:
        for batch_rows in batches:
            if way == "by_length" and batch_rows == 1:
                continue  # the order of rows that are alone does not matter
            trial = _try(replace(spec, contender=way, batch_rows=batch_rows, num_rows=num_rows), start)
            trials.append(trial)
            shown = trial.failure if trial.rows_per_s is None else f"{trial.rows_per_s:.2f} rows/s"
            say(f"  {way}, {batch_rows} rows: {shown}")
    return trials


def _try(spec: Spec, start: Callable[[Spec], Outcome]) -> Trial:
    assert spec.contender != "brim"
    assert spec.batch_rows is not None
    try:
        outcome = start(spec)
    except RunFailed as failure:
        return Trial(way=spec.contender, batch_rows=spec.batch_rows, rows_per_s=None, failure=str(failure))
    return Trial(
        way=spec.contender,
        batch_rows=spec.batch_rows,
        rows_per_s=outcome.rows_per_s,
        peak_bytes=outcome.peak_bytes,
    )


def best(trials: Sequence[Trial], way: Way) -> int | None:
    """Return rows of the fastest batch; None where all failed."""
    done = [trial for trial in trials if trial.way == way and trial.rows_per_s is not None]
    fastest = max(done, key=lambda trial: trial.rows_per_s or 0.0, default=None)
    return None if fastest is None else fastest.batch_rows


def contenders(spec: Spec, trials: Sequence[Trial]) -> dict[str, Spec]:
    """Return brim with its own plan, each other contender as the hand search found it best, and row by row."""
    chosen = {"brim": replace(spec, contender="brim", batch_rows=None)}
    for way in SEARCHED:
        batch_rows = best(trials, way)
        if batch_rows is not None:
            chosen[way] = replace(spec, contender=way, batch_rows=batch_rows)
    return {**chosen, ROW_BY_ROW: replace(spec, contender="static", batch_rows=1)}


def race(
    specs: Mapping[str, Spec],
    *,
    rounds: int,
    once: Sequence[str] = (ROW_BY_ROW,),
    say: Say,
    start: Callable[[Spec], Outcome] = run,
) -> dict[str, list[Outcome]]:
    """Run every contender once a round, in turn, each in a process of its own; every other round backwards.

    once: contenders that run in the first round alone.
    """
    names = list(specs)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            if name in once and number:
                continue
            outcome = start(specs[name])
            outcomes[name].append(outcome)
            say(f"  round {number + 1}, {name}: {outcome.generate_s:.1f} s, in all {outcome.whole_s:.1f} s")
    return outcomes


def summarize(specs: Mapping[str, Spec], outcomes: Mapping[str, Sequence[Outcome]]) -> list[Contender]:
    """Summarize each contender, brim among them."""
    ours = outcomes["brim"]
    return [
        Contender(
            name=name,
            batch_rows=specs[name].batch_rows,
            rows_per_s=round(median(each.rows_per_s for each in theirs), 3),
            generate_s=round(median(each.generate_s for each in theirs), 3),
            generate_s_of_each=[round(each.generate_s, 3) for each in theirs],
            whole_s=round(median(each.whole_s for each in theirs), 3),
            # A contender that ran once has the first round alone to be compared in.
            brim_is_faster=round(median(a.generate_s / b.generate_s for a, b in zip(theirs, ours, strict=False)), 3),
            brim_is_faster_in_all=round(median(a.whole_s / b.whole_s for a, b in zip(theirs, ours, strict=False)), 3),
            goal=GOALS.get(name),
            rows_equal=rows_equal(theirs[0].answers, ours[0].answers),
            rows_cut=sum(not answer.has_stopped for answer in theirs[0].answers),
            peak_bytes=max(each.peak_bytes for each in theirs),
        )
        for name, theirs in outcomes.items()
    ]


def rows_equal(theirs: Sequence[Answer], ours: Sequence[Answer]) -> int:
    return sum(a == b for a, b in zip(theirs, ours, strict=True))


def figures(
    trials: Sequence[Trial], found: Sequence[Contender], outcomes: Mapping[str, Sequence[Outcome]], prompts: list[int]
) -> dict[str, Any]:
    """Return the figures for the record. prompts: tokens of each."""
    ours = outcomes["brim"]
    return {
        "prompt_tokens": quantiles(prompts),
        "response_tokens": quantiles([answer.num_tokens for answer in ours[0].answers]),
        "hand_search": [asdict(trial) for trial in trials],
        "speed": [{**asdict(each), "is_met": each.is_met} for each in found],
        "brim_is_itself_in_each_round": all(each.answers == ours[0].answers for each in ours),
        "brim_summary": ours[-1].summary,
    }
