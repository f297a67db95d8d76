"""Compare runs of several configurations, and figures with their intervals, as tables for people.

Runs with the same seeds give means, and differences from the first configuration, paired by seed. The tables show
the losses, the costs of the runs, and every run; notes say what is counted, and what was not the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from brim.infer.metrics import Interval
from brim.report.picture import PageTable
from brim.train import RunFigures
from brim.units import format_bytes, format_count, format_seconds


def figure_lines(
    columns: Sequence[tuple[str, Mapping[str, float], Mapping[str, Interval]]], *, notes: Sequence[str] = ()
) -> list[str]:
    """Show figures side by side, a line for each metric; those without an interval come last.

    columns: a title, figures and their intervals. The last of several holds the differences of the others; its metrics
    are shown, and its intervals alone: with those of the others, a line would be wider than a screen.
    """
    *others, (_, last, intervals) = columns
    rows = [["", *(title for title, _, _ in columns)]]
    for name in sorted(last, key=lambda name: name not in intervals):
        cells = [f"{figures[name]:{'.4f' if name in intervals else ',.0f'}}" for _, figures, _ in others]
        difference = _figure_cell(last[name], intervals.get(name), sign="+" if others else "")
        rows.append([name.removeprefix("num_").replace("_", " "), *cells, difference])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return [*lines, "", _ABOUT, *notes]


_ABOUT = "In brackets: 95% intervals, bootstrap over rows. Loss in nats a token."


def _figure_cell(value: float, interval: Interval | None, *, sign: str = "") -> str:
    if interval is None:
        return f"{value:,.0f}"
    return f"{value:{sign}.4f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


_SAME = 1e-4  # share of the tokens; a smaller difference does not show in a loss


def comparison_notes(
    runs: Mapping[str, Runs], rows: Mapping[tuple[str, int], Mapping[str, str]], *, seeds: Sequence[int]
) -> list[str]:
    """Return notes for people. rows: by name and seed, a digest of the rows that each split holds."""
    split = final_split(runs)
    return [
        *_counted(split),
        *_scatter(len(seeds)),
        *_unequal(runs, rows, split),
        *_skipped(runs),
    ]


def _counted(split: str) -> Iterator[str]:
    yield "every run was trained to its end, without trainer.early_stop; its last weights count, not its best"
    if split == "train":
        yield (
            "not every run was evaluated on validation rows: the loss is the training's, the mean of the last tenth of "
            "the tokens, which each run saw while it learned"
        )


def _scatter(num_seeds: int) -> Iterator[str]:
    if num_seeds == 1:
        yield "one seed has no interval, and its differences may be chance: take three or more with --seeds"
    else:
        yield (
            "± half of a 95% interval over seeds, by Student's t; differences are of runs with the same seed, that is, "
            "with the same split and the same order of rows"
        )


def _unequal(runs: Mapping[str, Runs], rows: Mapping[tuple[str, int], Mapping[str, str]], split: str) -> Iterator[str]:
    first_name = next(iter(runs), None)
    for name, found in runs.items():
        pairs = [] if first_name is None else [(run, runs[first_name].get(seed)) for seed, run in found.items()]
        both = [(run, first) for run, first in pairs if first is not None]
        if name == first_name or first_name is None or not both:
            continue
        yield from _tokens(name, first_name, both)
        yield from _evaluated(name, first_name, both, split)
        if any(_other_rows(rows, name, first_name, seed) for seed in found):
            yield f"{name} and {first_name} do not have the same rows: different ones were left out (ledger.parquet)"


def _tokens(name: str, first_name: str, both: Sequence[tuple[RunFigures, RunFigures]]) -> Iterator[str]:
    ours, theirs = (math.fsum(pair[side].num_tokens for pair in both) / len(both) for side in (0, 1))
    if abs(ours - theirs) > _SAME * theirs:
        yield (
            f"not equal in tokens: {name} was trained on {ours:,.0f}, {first_name} on {theirs:,.0f} "
            f"({ours / theirs - 1:+.1%}); they have equally many rows, but not equally many tokens a row"
        )


def _evaluated(name: str, first_name: str, both: Sequence[tuple[RunFigures, RunFigures]], split: str) -> Iterator[str]:
    for each in (split, "test"):
        for run, first in both:
            ours, theirs = run.evaluated_tokens.get(each), first.evaluated_tokens.get(each)
            if ours is not None and theirs is not None and ours != theirs:
                yield (
                    f"the {each} losses of {name} and {first_name} are means over different tokens, {ours:,} and "
                    f"{theirs:,}: their difference is not one of learning alone"
                )
                break


def _other_rows(rows: Mapping[tuple[str, int], Mapping[str, str]], name: str, first_name: str, seed: int) -> bool:
    ours, theirs = rows.get((name, seed)), rows.get((first_name, seed))
    return bool(ours) and bool(theirs) and ours != theirs


def _skipped(runs: Mapping[str, Runs]) -> Iterator[str]:
    for name, found in runs.items():
        number = sum(run.num_skipped for run in found.values())
        if number:
            were = "was" if number == 1 else "were"
            yield f"{name}: {format_count(number, 'step')} {were} left out, since the loss or gradient was not finite"


_WHOSE: Mapping[str, str] = {
    "validation": "Final loss on the validation rows",
    "test": "Final loss on the test rows",
    "train": "Loss of the last tenth of the training",
}


def comparison_tables(
    found: Sequence[Summary], runs: Mapping[str, Runs], *, first: str, splits: Sequence[str]
) -> list[PageTable]:
    """Return tables of the losses on each split, of what the runs took, and of the runs themselves.

    The losses are means over seeds, with the difference from the first configuration. runs: those that get a line each;
    with none, the last table is left out.
    """
    losses = [_loss_table(found, first=first, split=split) for split in splits]
    return [*losses, _cost_table(found), *([_run_table(runs, splits=splits)] if runs else [])]


def _cost_table(found: Sequence[Summary]) -> PageTable:
    """Return a table of steps, samples, tokens, time and memory; where the runs differ, from the least to the most."""
    return PageTable(
        caption="What a run takes; time of the steps alone, largest memory of all seeds",
        heads=("configuration", "steps", "rows", "tokens", "time", "memory"),
        rows=[
            (
                each.name,
                _range(each.num_steps, _count),
                _range(each.num_samples, _count),
                _range(each.num_tokens, _count),
                format_seconds(each.seconds.mean),
                format_bytes(int(each.peak_bytes.most)),
            )
            for each in found
        ],
    )


def _run_table(runs: Mapping[str, Runs], *, splits: Sequence[str]) -> PageTable:
    """Return a table of all runs, by seed."""
    seeds = sorted({seed for found in runs.values() for seed in found})
    return PageTable(
        caption="Every run",
        heads=("seed", "configuration", *(f"{split} loss" for split in splits), "steps", "tokens", "time", "memory"),
        rows=[
            _run_cells(name, seed, found[seed], splits)
            for seed in seeds
            for name, found in runs.items()
            if seed in found
        ],
        num_texts=2,
    )


def _run_cells(name: str, seed: int, run: RunFigures, splits: Sequence[str]) -> list[str]:
    losses = (_loss(run.losses.get(split, math.nan)) for split in splits)
    took = (_count(run.num_steps), _count(run.num_tokens), format_seconds(run.seconds), format_bytes(run.peak_bytes))
    return [str(seed), name, *losses, *took]


def _loss_table(found: Sequence[Summary], *, first: str, split: str) -> PageTable:
    shown = [each for each in found if split in each.losses]
    with_seeds = len({each.seeds for each in shown}) > 1
    seeds_of = ["seeds"] if with_seeds else []
    return PageTable(
        caption=f"{_WHOSE[split]}, and how it differs from that of {first}",
        heads=("configuration", *seeds_of, "loss", "difference", "what the seeds show"),
        rows=[
            (
                each.name,
                *([", ".join(map(str, each.seeds))] if with_seeds else []),
                _estimate_cell(each.losses[split]),
                *_difference(each, split),
            )
            for each in shown
        ],
    )


def _difference(summary: Summary, split: str) -> tuple[str, str]:
    difference = summary.differences.get(split)
    return ("", "") if difference is None else (_estimate_cell(difference, sign="+"), difference.verdict)


def _estimate_cell(estimate: Estimate, *, sign: str = "") -> str:
    text = _loss(estimate.mean, sign=sign)
    interval = estimate.interval
    return text if interval is None else f"{text} ± {(interval.high - interval.low) / 2:.4f}"


def _loss(value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "none"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _range(spread: Spread, text: Callable[[float], str]) -> str:
    return text(spread.mean) if spread.least == spread.most else f"{text(spread.least)}–{text(spread.most)}"


Runs = Mapping[int, RunFigures]  # by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Hold a mean over seeds, with its interval."""

    mean: float
    interval: Interval | None  # 95%, by Student's t; None for one seed, or where a value is not a number
    num_seeds: int

    @property
    def verdict(self) -> str:
        """Say what the estimate shows of a difference between losses."""
        if self.interval is None:
            return "one seed shows nothing" if self.num_seeds == 1 else "not a number"
        if self.interval.low <= 0 <= self.interval.high:
            return "no difference that these seeds show"
        return "lower" if self.mean < 0 else "higher"

    def as_json(self) -> dict[str, Any]:
        """Return the mean and its interval; a mean that is not a number is None."""
        return {
            "mean": self.mean if math.isfinite(self.mean) else None,
            "interval": None if self.interval is None else [self.interval.low, self.interval.high],
            "num_seeds": self.num_seeds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Hold the least, the mean and the largest value of a figure over several runs."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Hold the results of one configuration over its seeds."""

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

    def as_json(self) -> dict[str, Any]:
        """Return all figures, each with what its name says; differences with what they show, too."""
        return {
            "name": self.name,
            "seeds": list(self.seeds),
            "losses": {split: each.as_json() for split, each in self.losses.items()},
            "differences": {
                split: {**each.as_json(), "says": each.verdict} for split, each in self.differences.items()
            },
            **{name: asdict(getattr(self, name)) for name in _SPREADS},
        }


_SPREADS = ("num_steps", "num_samples", "num_tokens", "num_supervised_tokens", "seconds", "peak_bytes")


def summaries(runs: Mapping[str, Runs]) -> list[Summary]:
    """Summarize each configuration that has a run, in order.

    Differences are from the first configuration, over the seeds that both have.
    """
    first = next(iter(runs), None)
    return [
        _summary(name, found, None if name == first or first is None else runs[first])
        for name, found in runs.items()
        if found
    ]


def final_split(runs: Mapping[str, Runs]) -> str:
    """Return the split whose loss is the result: validation if every run was evaluated on it, else train."""
    every = [run for found in runs.values() for run in found.values()]
    return "validation" if every and all("validation" in run.losses for run in every) else "train"


def _summary(name: str, runs: Runs, first: Runs | None) -> Summary:
    every = list(runs.values())
    splits = [split for split in ("validation", "test", "train") if all(split in run.losses for run in every)]
    return Summary(
        name=name,
        seeds=tuple(runs),
        losses={split: _estimate([run.losses[split] for run in every]) for split in splits},
        differences={} if first is None else _differences(runs, first, splits),
        **{each: _spread([getattr(run, each) for run in every]) for each in _SPREADS},
    )


def _differences(runs: Runs, first: Runs, splits: Sequence[str]) -> dict[str, Estimate]:
    differences = {}
    for split in splits:
        pairs = [(runs[seed], first[seed]) for seed in runs if seed in first and split in first[seed].losses]
        if pairs:
            differences[split] = _estimate([run.losses[split] - other.losses[split] for run, other in pairs])
    return differences


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(mean=_mean(values), interval=Interval.of_mean(values), num_seeds=len(values))


def _spread(values: Sequence[float]) -> Spread:
    return Spread(least=min(values), mean=_mean(values), most=max(values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
