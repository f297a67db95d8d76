"""What to know of the figures of a comparison: what is counted, and what was not the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from brim.report.seed_summary import Runs, final_split
from brim.train.run_figures import RunFigures
from brim.units import format_count

_SAME = 1e-4  # of the tokens: less does not show in a loss


def comparison_notes(
    runs: Mapping[str, Runs], rows: Mapping[tuple[str, int], Mapping[str, str]], *, seeds: Sequence[int]
) -> list[str]:
    """Lines for people. rows: for name and seed, a digest of which rows each split holds."""
    split = final_split(runs)
    return [
        *_counted(split),
        *_scatter(len(seeds)),
        *_unequal(runs, rows, split),
        *_skipped(runs),
    ]


def _counted(split: str) -> Iterator[str]:
    yield "every run went to its end: without trainer.early_stop, and its last weights count, not its best"
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
            yield f"{name} does not have the same rows as {first_name}: other ones were left out (see ledger.parquet)"


def _tokens(name: str, first_name: str, both: Sequence[tuple[RunFigures, RunFigures]]) -> Iterator[str]:
    ours, theirs = (math.fsum(pair[side].num_tokens for pair in both) / len(both) for side in (0, 1))
    if abs(ours - theirs) > _SAME * theirs:
        yield (
            f"not equal in tokens: {name} was trained on {ours:,.0f}, {first_name} on {theirs:,.0f} "
            f"({ours / theirs - 1:+.1%}); the rows are as many, but not the tokens of a row"
        )


def _evaluated(name: str, first_name: str, both: Sequence[tuple[RunFigures, RunFigures]], split: str) -> Iterator[str]:
    for each in (split, "test"):
        for run, first in both:
            ours, theirs = run.evaluated_tokens.get(each), first.evaluated_tokens.get(each)
            if ours is not None and theirs is not None and ours != theirs:
                yield (
                    f"the {each} losses of {name} and {first_name} are means over other tokens, {ours:,} and "
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
