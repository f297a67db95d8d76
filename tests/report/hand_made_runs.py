"""Figures of runs, made by hand, and a comparison of them."""

from pathlib import Path

from brim.train import Curve, RunFigures
from brim.workflows.compare import CompareResult
from brim.workflows.compare.results import ComparedRun


def figures(loss, *, test=None, steps=10, tokens=1000, samples=40, seconds=2.0, evaluations=4, **changes):
    """A run whose losses fall to `loss`; test: its loss on test rows."""
    losses = {"train": loss - 0.1, "validation": loss} | ({} if test is None else {"test": test})
    ends = [tokens * (number + 1) // steps for number in range(steps)]
    places = [tokens * (number + 1) // evaluations for number in range(evaluations)]
    return RunFigures(
        **{
            "losses": losses,
            "evaluated_tokens": {"validation": 50} | ({} if test is None else {"test": 60}),
            "num_steps": steps,
            "num_samples": samples,
            "num_tokens": tokens,
            "num_supervised_tokens": tokens // 2,
            "num_skipped": 0,
            "seconds": seconds,
            "peak_bytes": 3 << 20,
            "train_curve": Curve(
                tokens=tuple(ends),
                loss=tuple(loss + 100 / end for end in ends),
                weights=(tokens // steps // 2,) * steps,
            ),
            "validation_curve": Curve(
                tokens=tuple(places), loss=tuple(loss + 50 / end for end in places), weights=(50,) * evaluations
            ),
            **changes,
        }
    )


def two_by_three():
    """The second is lower by 0.2 on validation rows for every seed, but for a hair; and on test rows neither is."""
    return {
        "a": {seed: figures(2.0 + 0.1 * seed, test=2.5 + 0.1 * seed, tokens=1000 + seed) for seed in (0, 1, 2)},
        "b": {
            seed: figures(1.8 + 0.1 * seed + 0.001 * seed, test=2.5 + 0.4 * seed - 0.3, steps=20, tokens=1000 + seed)
            for seed in (0, 1, 2)
        },
    }


def comparison_of_two_by_three(*, more=()):
    """These as `brim.compare` gives them; more: runs beside them."""
    runs = [
        ComparedRun(name=name, seed=seed, outcome="finished", figures=run, rows={}, error=None)
        for name, found in two_by_three().items()
        for seed, run in found.items()
    ]
    files = {"a": "small.yaml", "b": "large.yaml"}
    return CompareResult(
        output_directory=Path("out"), files=files, digests=files, seeds=(0, 1, 2), changes=(), runs=(*runs, *more)
    )
