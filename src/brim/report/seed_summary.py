"""What runs of several configurations with the same seeds show: means, and differences to the first, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brim.infer.bootstrap import Interval
from brim.infer.student_t import mean_interval
from brim.train.run_figures import RunFigures

Runs = Mapping[int, RunFigures]  # by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    interval: Interval | None  # 95%, by Student's t; None for one seed, or where a value is no number
    num_seeds: int

    @property
    def is_apart_from_zero(self) -> bool:
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure of several runs."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One configuration."""

    name: str
    seeds: tuple[int, ...]  # of the runs that came to their end
    losses: Mapping[str, Estimate]  # split -> final loss
    differences: Mapping[str, Estimate]  # split -> final loss less the first configuration's; none for the first
    num_steps: Spread
    num_samples: Spread
    num_tokens: Spread
    num_supervised_tokens: Spread
    seconds: Spread
    peak_bytes: Spread


def summaries(runs: Mapping[str, Runs]) -> list[Summary]:
    """Of each configuration that has a run, in order. Differences are to the first, of the seeds that both have."""
    first = next(iter(runs), None)
    return [
        _summary(name, found, None if name == first or first is None else runs[first])
        for name, found in runs.items()
        if found
    ]


def final_split(runs: Mapping[str, Runs]) -> str:
    """Whose loss is the result: validation, where every run was evaluated on it, else the training's."""
    every = [run for found in runs.values() for run in found.values()]
    return "validation" if every and all("validation" in run.losses for run in every) else "train"


def verdict(difference: Estimate) -> str:
    """What a difference of losses says, in words."""
    if difference.interval is None:
        return "one seed shows nothing" if difference.num_seeds == 1 else "not a number"
    if not difference.is_apart_from_zero:
        return "no difference that these seeds show"
    return "lower" if difference.mean < 0 else "higher"


def _summary(name: str, runs: Runs, first: Runs | None) -> Summary:
    every = list(runs.values())
    splits = [split for split in ("validation", "test", "train") if all(split in run.losses for run in every)]
    return Summary(
        name=name,
        seeds=tuple(runs),
        losses={split: _estimate([run.losses[split] for run in every]) for split in splits},
        differences={} if first is None else _differences(runs, first, splits),
        num_steps=_spread([run.num_steps for run in every]),
        num_samples=_spread([run.num_samples for run in every]),
        num_tokens=_spread([run.num_tokens for run in every]),
        num_supervised_tokens=_spread([run.num_supervised_tokens for run in every]),
        seconds=_spread([run.seconds for run in every]),
        peak_bytes=_spread([run.peak_bytes for run in every]),
    )


def _differences(runs: Runs, first: Runs, splits: Sequence[str]) -> dict[str, Estimate]:
    differences = {}
    for split in splits:
        pairs = [(runs[seed], first[seed]) for seed in runs if seed in first and split in first[seed].losses]
        if pairs:
            differences[split] = _estimate([run.losses[split] - other.losses[split] for run, other in pairs])
    return differences


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(mean=_mean(values), interval=mean_interval(values), num_seeds=len(values))


def _spread(values: Sequence[float]) -> Spread:
    return Spread(least=min(values), mean=_mean(values), most=max(values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
