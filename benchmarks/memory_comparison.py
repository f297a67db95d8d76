"""Compare measured memory with what brim predicts for the same case."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory_cases import Case, architecture_of
from benchmarks.memory_foretold import Foretold, foretell
from benchmarks.report import print_table
from brim.errors import BrimError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Hold one figure of one case, both ways; bytes."""

    case: str
    figure: str  # "train 1 allocated", "evaluate reserved"
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold every pair, and the cases that have none, with the reason."""

    pairs: tuple[Pair, ...]
    missing: tuple[tuple[str, str], ...]

    def summary(self) -> dict[str, dict[str, float]]:
        """Return pairs, median and largest error of each kind of figure."""
        found = {}
        for kind in ("allocated", "reserved", "total"):
            errors = [abs(pair.error) for pair in self.pairs if pair.figure.endswith(kind)]
            if errors:
                found[kind] = {"pairs": len(errors), "median_error": median(errors), "largest_error": max(errors)}
        return found


def compared(figures: Mapping[str, Any]) -> Comparison:
    """Predict for each case that ran. figures: what `benchmarks.memory_gpu.measure` gave."""
    pairs: list[Pair] = []
    missing: list[tuple[str, str]] = []
    for told in figures["cases"]:
        reason = told.get("skipped") or told.get("error")
        if reason is None:
            try:
                pairs += _pairs(told, _foretold(told, figures))
                continue
            except BrimError as error:
                reason = f"not predicted: {' '.join(str(error).split())}"
        missing.append((told["name"], reason))
    return Comparison(pairs=tuple(pairs), missing=tuple(missing))


def show(comparison: Comparison) -> None:
    rows = [
        (pair.case, pair.figure, _mib(pair.measured), _mib(pair.predicted), f"{pair.error:+.2%}")
        for pair in comparison.pairs
    ]
    print_table("predicted against measured (MiB)", ("case", "figure", "measured", "predicted", "error"), rows)
    summary = [
        (kind, str(found["pairs"]), f"{found['median_error']:.2%}", f"{found['largest_error']:.2%}")
        for kind, found in comparison.summary().items()
    ]
    print_table("in short", ("figure", "pairs", "median", "largest"), summary)
    for name, reason in comparison.missing:
        print(f"not compared: {name}: {reason}")


def _foretold(told: Mapping[str, Any], figures: Mapping[str, Any]) -> Sequence[Foretold]:
    case = Case(**{**told["case"], "step_lengths": tuple(map(tuple, told["case"]["step_lengths"]))})
    with tempfile.TemporaryDirectory() as name:
        config = architecture_of(case, small=figures["small"])
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return foretell(case, name, figures["device"])


def _pairs(told: Mapping[str, Any], foretold: Sequence[Foretold]) -> Iterator[Pair]:
    by_part = {(each.phase, each.step): each for each in foretold}
    for peak in told["peaks"]:
        predicted = by_part.get((peak["phase"], peak["step"]))
        if predicted is None:
            continue
        part = peak["phase"] if peak["step"] is None else f"{peak['phase']} {peak['step']}"
        both = [
            ("allocated", peak["allocated_bytes"], predicted.allocated_bytes),
            ("reserved", peak["reserved_bytes"], predicted.reserved_bytes),
        ]
        if peak["allocated_bytes"] is None:  # a CPU
            both = [("total", peak["total_bytes"], peak["baseline_bytes"] + predicted.allocated_bytes)]
        for figure, measured, bytes_predicted in both:
            yield Pair(case=told["name"], figure=f"{part} {figure}", measured=measured, predicted=bytes_predicted)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
