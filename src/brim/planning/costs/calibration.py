"""Keep the peaks that runs measured, and correct later predictions on the same device by them.

What a shape adds to what is there whatever the shape is scaled; what lies outside PyTorch is replaced by what was
seen. The static bytes are not scaled: they are counted tensor by tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter

from brim.batching import Costs
from brim.infer.engines import CacheCosts
from brim.storage import Cache, digest
from brim.units import format_count

_KIND = "calibrations"


_MOST_RUNS = 8  # the newest ones count; drivers and libraries change


LEAST_SCALE, MOST_SCALE = 0.5, 2.0  # what is off by more is not a mistake of the model


# The share of a peak that its shape must add to count: below it pages, caches and workspaces outweigh the shape.
_TELLING_SHARE = 0.05


# And at least so much: beside its tensors a process keeps 14 MB of packed matrices and compiled kernels, and more of
# a heap (docs/decisions/0010-resident-memory-on-a-cpu.md), which are not the shape's.
TELLING_BYTES = 64 * 2**20


_ALIKE = 0.01  # a scale that is off by less changes nothing


Peak: TypeAlias = tuple[int, int]  # of a step or a probe: allocated as predicted before any correction, and as measured


AnyCosts = TypeVar("AnyCosts", Costs, CacheCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeaks:
    """Hold what one run has measured."""

    # Measured over predicted, of what the shapes add; of the step in which it was most.
    scale: Annotated[float, Field(ge=LEAST_SCALE, le=MOST_SCALE, allow_inf_nan=False)]
    outside_bytes: int | None  # the most that was seen outside PyTorch's allocator; None: nobody looked


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Hold what later plans take into account."""

    scale: float = 1.0
    outside_bytes: int | None = None  # None: what is usual for the device
    num_runs: int = 0

    @property
    def reason(self) -> str:
        """Return the correction for people; empty where nothing has been measured."""
        if not self.num_runs:
            return ""
        runs = format_count(self.num_runs, "run")
        return f"measured in {runs}: ×{self.scale:.2f}"


def of_run(peaks: Sequence[Peak], *, static_bytes: int, outside_bytes: int | None = None) -> RunPeaks | None:
    """Return what the peaks of one run say; None where no shape added enough to count.

    The largest ratio counts, since a plan must hold for every step; that of peaks far below the largest one does not.
    """
    added = [(predicted, predicted - static_bytes, measured - static_bytes) for predicted, measured in peaks]
    most = max((of_prediction for _, of_prediction, _ in added), default=0)
    telling = [
        measured / of_prediction
        for predicted, of_prediction, measured in added
        if of_prediction >= max(0.5 * most, _TELLING_SHARE * predicted, TELLING_BYTES)
    ]
    if not telling:
        return None
    return RunPeaks(scale=_bounded(max(telling)), outside_bytes=outside_bytes)


def corrected(costs: AnyCosts, probe: Peak) -> AnyCosts:
    """Return the costs with what a probe has just shown, where it shows more than was expected.

    A probe that takes less than predicted lowers nothing: other rows may take more than those that were tried.
    """
    found = of_run([probe], static_bytes=costs.static_bytes)
    if found is None or found.scale <= costs.scale * (1 + _ALIKE):
        return costs
    return replace(costs, scale=found.scale)


def combined(runs: Sequence[RunPeaks]) -> Correction:
    """Return the correction of several runs: the median, so that no disturbed run counts; of two the larger."""
    newest = runs[-_MOST_RUNS:]
    if not newest:
        return Correction()
    scale = statistics.median_high([run.scale for run in newest])
    outside = [run.outside_bytes for run in newest if run.outside_bytes is not None]
    return Correction(
        scale=1.0 if abs(scale - 1) <= _ALIKE else _bounded(scale),
        outside_bytes=statistics.median_high(outside) if outside else None,
        num_runs=len(newest),
    )


class Calibrations:
    """Keep measured peaks on disk, by device, model and versions. `note`: what was wrong with the file, if anything.

    facts: what a correction depends on: the device's name, the model's config.json, adapter, precision, quantization,
    versions, and the share of tokens that are supervised, in coarse steps, since predictions take all for supervised;
    neither the strategy nor the rows.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._cache = Cache(folder, _KIND)
        self._name = digest(facts)

    @property
    def note(self) -> str | None:
        return self._cache.note

    def correction(self) -> Correction:
        """Return that of the runs so far."""
        return combined(self._runs())

    def learn(self, peaks: Sequence[Peak], *, static_bytes: int, outside_bytes: int | None = None) -> None:
        """Keep what the peaks of a run say, if anything (see `of_run`)."""
        run = of_run(peaks, static_bytes=static_bytes, outside_bytes=outside_bytes)
        if run is not None:
            self._cache.write(self._name, [asdict(each) for each in [*self._runs(), run][-_MOST_RUNS:]])

    def _runs(self) -> list[RunPeaks]:
        return self._cache.read(self._name, TypeAdapter(list[RunPeaks]).validate_python) or []


def _bounded(scale: float) -> float:
    return min(max(scale, LEAST_SCALE), MOST_SCALE)
