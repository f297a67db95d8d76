"""Measure the memory of random-weight models on this device, and compare it with what brim predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks import memory_gpu
from benchmarks.gpu.cases import Case, Figures, Options, Skip
from benchmarks.memory_cases import grid
from benchmarks.memory_comparison import Comparison, Pair, compared

_MEASURING = 0.6  # of the time; predicting takes the rest
_FEW = [case for case in grid() if case.architecture == "qwen2-0.5b" and (case.packed or case.does == "infer")][:3]
_MEDIAN, _LARGEST = 0.01, 0.05  # relative errors of allocated bytes


def cases(options: Options) -> Iterator[Case]:
    """Yield one case that measures, one for each prediction, and one for all of them."""
    measured: Figures = {"cases": []}
    pairs: list[Pair] = []
    yield Case(
        name=f"measured: {options.only or 'all'}",
        run=partial(_measure, options, measured),
        passes=lambda found: found["measured"] > 0 and not found["lost"],
        expects="no case ends with an error",
    )
    for told in measured["cases"]:
        yield Case(
            name=told["name"],
            run=partial(_compare, {**measured, "cases": [told]}, pairs),
            passes=lambda found: not options.is_cuda or found["allocated"] <= _LARGEST,
            expects=f"predicted allocated bytes within {_LARGEST:.0%} of the measured ones of every step, on CUDA",
        )
    yield Case(
        name="all of them",
        run=partial(_summary, pairs),
        passes=lambda found: not options.is_cuda or found["allocated"]["median_error"] <= _MEDIAN,
        expects=f"a median error of allocated bytes of {_MEDIAN:.0%} at most, on CUDA",
        needs_s=0,
    )


def _measure(options: Options, measured: Figures) -> Figures:
    """Run the grid of benchmarks.memory_gpu, which writes its own report after each case."""
    given = memory_gpu.Options(
        device=str(options.device),
        small=options.small,
        only=options.only,
        budget_s=_MEASURING * options.left_s,
        out=options.out,
    )
    measured |= memory_gpu.measure(given, _FEW if options.small else None)
    lost = [told["name"] for told in measured["cases"] if "error" in told]
    skipped = sum("skipped" in told for told in measured["cases"])
    number = len(measured["cases"]) - skipped - len(lost)
    return {"measured": number, "skipped": skipped, "lost": lost, "device": measured["device"]}


def _compare(figures: Mapping[str, Any], pairs: list[Pair]) -> Figures:
    """Return the largest error of each kind of bytes; keep the pairs."""
    (told,) = figures["cases"]
    if "skipped" in told:
        raise Skip(told["skipped"])
    if "error" in told:
        raise RuntimeError(told["error"])
    comparison = compared(figures)
    if not comparison.pairs:
        raise RuntimeError(comparison.missing[0][1])
    pairs += comparison.pairs
    largest = {kind: found["largest_error"] for kind, found in comparison.summary().items()}
    return {**largest, "bytes": {pair.figure: [pair.measured, pair.predicted] for pair in comparison.pairs}}


def _summary(pairs: list[Pair]) -> Figures:
    if not pairs:
        raise Skip("nothing was compared")
    return dict(Comparison(pairs=tuple(pairs), missing=()).summary())
