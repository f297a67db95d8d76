"""Estimate how long a micro-batch would take on another device, and correct predictions by what runs measured.

The work of a micro-batch of any shape follows from that of a few shapes that were traced. A roofline gives the
seconds of the work on a device, and what they are bound by.

Peaks that runs measured correct later predictions on the same device: what a shape adds to what is there whatever the
shape is scaled; what lies outside PyTorch is replaced by what was seen. The static bytes are not scaled: they are
counted tensor by tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, TypeAdapter

from brim.batching import Costs, Surface
from brim.infer.engines import CacheCosts
from brim.memory.devices import DeviceSpeed
from brim.memory.events import Work, WorkCount, WorkPhase, WorkPlace
from brim.planning.costs.sampling import Shape
from brim.storage import Cache, digest
from brim.units import format_count

_LENGTHS = 5  # lines of a surface


_LEAST_SAMPLE_TOKENS = 8  # of the first sample of a line; before it, a line to no tokens at all


_WORTH_SAYING = 0.02


# What bounds a step, in words, and what else there is to know of it.
_BOUNDS = {
    "arithmetic": ("arithmetic", ", and 4-bit weights save memory, not time"),
    "memory traffic": (
        "memory traffic",
        "; 4-bit weights alone save none, since each product writes them out in half precision first",
    ),
    "launches": ("the host, which starts kernels", "; a device that computes faster would not help"),
}


_A_LINE = 24  # samples: neighbours differ by less than a factor of two


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Predict the seconds of a micro-batch's forward and backward pass."""

    surface: Surface
    law: WorkLaw
    speed: DeviceSpeed

    @classmethod
    def of(
        cls, counts: Mapping[Shape, WorkCount], speed: DeviceSpeed, *, longest: int, shortest: int, most_rows: int
    ) -> TimeEstimate:
        """Return the estimate by the work of a few shapes: those that `shapes_to_count` asks for, and any others.

        longest, shortest: tokens of the rows that there are. most_rows: of a micro-batch.
        """
        law = work_law(counts)
        lengths = _spread(shortest, longest, _LENGTHS)
        tokens = _spread(_LEAST_SAMPLE_TOKENS, max(most_rows * longest, 2 * _LEAST_SAMPLE_TOKENS), _A_LINE)
        lines = [roofline(law, speed, tokens, length).total_s for length in lengths]
        surface = Surface(
            base=float(roofline(law, speed, 0, shortest).total_s[0]),
            lengths=lengths,
            tokens=(tokens,) * len(lengths),
            values=tuple(tuple(np.maximum.accumulate(line).tolist()) for line in lines),
        )
        return cls(surface=surface, law=law, speed=speed)

    def parts(self, shapes: Sequence[Shape], *, phase: WorkPhase | None = None) -> Parts:
        """Return what these micro-batches, (rows, tokens of each), are bound by, together. phase: of them alone."""
        rows, lengths = np.array(shapes, dtype=np.float64).T
        return roofline(self.law if phase is None else self.law.of(phase), self.speed, rows * lengths, lengths)

    def recomputed(self, shapes: Sequence[Shape]) -> float:
        """Return the share of their time that goes into recomputing activations."""
        total, again = (float(self.parts(shapes, phase=phase).total_s.sum()) for phase in (None, "recompute"))
        return min(again / total, 1.0)

    def advice(self, shapes: Sequence[Shape]) -> tuple[str, ...]:
        """Return what would make steps faster. shapes: the micro-batches of typical steps, (rows, tokens of each)."""
        parts, less = self.parts(shapes), self.less_when_doubled(shapes)
        bound_by, share = parts.bound_by, parts.shares[parts.bound_by]
        doubled = "micro-batches of twice the rows would "
        doubled += f"take {less:.0%} less time per token" if less >= _WORTH_SAYING else "not make it faster"
        what, more = _BOUNDS[bound_by]
        advice = (f"a step is bound by {what} ({share:.0%} of its time): {doubled}{more}",)
        recomputed = self.recomputed(shapes)
        if recomputed < _WORTH_SAYING:
            return advice
        spends = f"activation checkpointing spends {recomputed:.0%} of the time on recomputing"
        return (*advice, f"{spends}: with free memory, drop it first")

    def less_when_doubled(self, shapes: Sequence[Shape]) -> float:
        """Return the share of the time a token that goes away with micro-batches of twice the rows."""
        rows, lengths = np.array(shapes, dtype=np.float64).T
        once, twice = (float(self.surface(factor * rows, lengths).sum()) for factor in (1, 2))
        return max(0.0, 1.0 - twice / (2 * once))


def _spread(first: int, last: int, number: int) -> tuple[int, ...]:
    """Return whole numbers from one to the other, in steps of about one factor."""
    steps = np.geomspace(first, max(last, first), number)
    return tuple(sorted({first, last, *(round(float(step)) for step in steps)})) if last > first else (first,)


@dataclass(frozen=True, slots=True)
class Parts:
    """Hold the seconds of S shapes by what they are bound by."""

    seconds: Mapping[BoundBy, NDArray[np.float64]]  # each [S]; launches: Python, the dispatcher, the start of kernels

    @property
    def total_s(self) -> NDArray[np.float64]:
        return np.asarray(sum(self.seconds.values()))

    @property
    def shares(self) -> dict[BoundBy, float]:
        """Return the shares of the time of all shapes together: 1 in all."""
        sums = {name: float(each.sum()) for name, each in self.seconds.items()}
        total = sum(sums.values())
        return {name: each / total for name, each in sums.items()}

    @property
    def bound_by(self) -> BoundBy:
        """Return what takes the largest share."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name])


def roofline(law: WorkLaw, speed: DeviceSpeed, num_tokens: ArrayLike, length: ArrayLike) -> Parts:
    """Return seconds: a kernel takes as long as its arithmetic or its memory traffic, whichever is longer.

    A GPU works off a queue that the host fills: a micro-batch takes as long as the slower of the two. On a CPU they are
    one, and the times add up. After Williams, Waterman, Patterson, "Roofline" (2009).
    """
    flops, num_bytes, kernels = law.at(num_tokens, length)
    flops_per_s = np.array([speed.flops_per_s(place.unit, place.dtype) for place in law.places])
    arithmetic = flops / flops_per_s[:, None]
    memory = num_bytes / speed.bytes_per_s
    least = kernels * speed.least_s_per_kernel
    device = np.maximum(np.maximum(arithmetic, memory), least)
    host = kernels.sum(axis=0) * speed.host_s_per_kernel
    waiting = np.maximum(host - device.sum(axis=0), 0.0) if speed.is_asynchronous else host
    is_arithmetic = (arithmetic >= memory) & (arithmetic >= least)
    is_memory = ~is_arithmetic & (memory >= least)
    return Parts(
        {
            "arithmetic": np.where(is_arithmetic, device, 0.0).sum(axis=0),
            "memory traffic": np.where(is_memory, device, 0.0).sum(axis=0),
            "launches": np.where(is_arithmetic | is_memory, 0.0, device).sum(axis=0) + waiting,
        }
    )


def seconds_of(work: WorkCount, speed: DeviceSpeed) -> float:
    """Return the seconds of work that no shape changes, such as an optimizer's update."""
    return float(roofline(work_law({(1, 1): work}), speed, 1, 1).total_s[0])


def fewest_near_least(numbers: NDArray[np.number], seconds: NDArray[np.float64], *, within: float) -> int:
    """Return the first number of tokens or rows whose time for one of them is near the least. seconds: of each."""
    each_s = seconds / numbers
    return int(numbers[int(np.argmax(each_s <= (1 + within) * each_s.min()))])


BoundBy: TypeAlias = Literal["arithmetic", "memory traffic", "launches"]


# Below it some libraries have kernels of their own: bitsandbytes takes another product up to 4 tokens.
_LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLaw:
    """Predict FLOPs, bytes and kernels of each place as a + b·N + c·N·T, N = rows × T tokens.

    Of a transformer that is exact: weights are read once whatever the shape, what a token does is N's, and scores of
    attention are N·T's. The loss in chunks starts its kernels in steps of a chunk, which this draws as a line.
    """

    places: tuple[WorkPlace, ...]  # K
    terms: NDArray[np.float64]  # [3, K, 3]: a, b, c of FLOPs, of bytes and of kernels

    def at(self, num_tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Return FLOPs, bytes and kernels [3, K, S] of S shapes."""
        return np.maximum(self.terms @ _features(num_tokens, length), 0.0)

    def of(self, phase: WorkPhase) -> WorkLaw:
        """Return the law of one phase alone."""
        chosen = [number for number, place in enumerate(self.places) if place.phase == phase]
        return WorkLaw(places=tuple(self.places[number] for number in chosen), terms=self.terms[:, chosen])


def work_law(counts: Mapping[Shape, WorkCount]) -> WorkLaw:
    """Return the law through these shapes. Where all are of one length, it holds for that length.

    Where there are fewer shapes than the law has terms, `shapes_to_count` says which ones are missing.
    """
    shapes = sorted(shape for shape in counts if shape[0] * shape[1] >= _LEAST_TOKENS) or sorted(counts)
    return law_through([(rows * tokens, tokens, counts[rows, tokens]) for rows, tokens in shapes])


def law_through(counted: Sequence[tuple[int, int, WorkCount]]) -> WorkLaw:
    """Return the law through passes over N tokens, each of which attends to T: (N, T, work)."""
    places = tuple(dict.fromkeys(place for _, _, work in counted for place in work.places))
    found = [[work.places.get(place, Work(0, 0, 0)) for _, _, work in counted] for place in places]
    num_tokens, lengths = (np.array([each[axis] for each in counted], dtype=np.float64) for axis in (0, 1))
    features = _features(num_tokens, lengths)
    if len(set(lengths)) == 1:
        features[2] = 0.0  # no difference can be seen between N and N·T
    values = ([[getattr(work, name) for work in line] for line in found] for name in ("flops", "num_bytes", "kernels"))
    return WorkLaw(places=places, terms=np.array([_fitted(features, each) for each in values]).swapaxes(1, 2))


def shapes_to_count(known: Collection[Shape], *, longest: int, short: int, most_rows: int) -> list[Shape]:
    """Return the shapes to trace besides those that are known, so that a law can be drawn; none or few."""
    usable = [shape for shape in known if shape[0] * shape[1] >= _LEAST_TOKENS]
    wanted = [(1, longest), (min(2, most_rows), longest)] + ([(most_rows, short)] if 2 * short <= longest else [])
    missing: list[Shape] = []
    for shape in wanted:
        if shape not in usable and _rank([*usable, *missing, shape]) > _rank([*usable, *missing]):
            missing.append(shape)
    return missing


def _features(num_tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
    """Return [3, S]: 1, N, N·T."""
    tokens, lengths = np.broadcast_arrays(np.atleast_1d(num_tokens), np.atleast_1d(length))
    return np.stack([np.ones(tokens.shape), tokens.astype(np.float64), tokens * lengths.astype(np.float64)])


def _fitted(features: NDArray[np.float64], values: list[list[int]]) -> NDArray[np.float64]:
    """Return [3, K]: least squares of relative errors, since most values are in proportion to N. values: [K, S]."""
    weights = 1.0 / features[1]
    scale = np.maximum(np.abs(features * weights).max(axis=1), 1e-300)
    system = (features * weights / scale[:, None]).T
    wanted = (np.array(values, dtype=np.float64).reshape(len(values), -1) * weights).T
    solved, *_ = np.linalg.lstsq(system, wanted, rcond=1e-9)
    return np.asarray(solved / scale[:, None])


def _rank(shapes: Collection[Shape]) -> int:
    if not shapes:
        return 0
    rows, lengths = np.array(sorted(shapes), dtype=np.float64).T
    features = _features(rows * lengths, lengths)
    return int(np.linalg.matrix_rank(features / np.abs(features).max(axis=1, keepdims=True), tol=1e-6))


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
