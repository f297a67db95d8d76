"""Describe a measurement as JSON messages: what is asked of one fresh process, and what it reports.

Torch-free, so that a report needs no torch. What was recorded in time becomes a timeline with its marks and spikes;
live bytes decide whether steps leave memory behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.config.schema import Config
from brim.memory.trace import Phase, Place
from brim.models import ModelFolder

WARM_UP_STEPS = 1  # the optimizer's state and the caches of kernels are born in the first


LEAST_RISES = 3  # in a row: fewer happen by chance where lengths vary


def rise_per_step(end_bytes: Sequence[int], *, tolerance_bytes: int) -> int | None:
    """The median rise where each step after the first ended above the one before it; None where one did not.

    end_bytes: live after each step, equal in shape. tolerance_bytes: what counts as no rise, such as an allocator's
    rounding.
    """
    counted = end_bytes[WARM_UP_STEPS:]
    rises = [after - before for before, after in pairwise(counted)]
    if len(rises) < LEAST_RISES or min(rises) <= tolerance_bytes:
        return None
    return round(median(rises))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one model, loaded once."""

    device: str
    kind: str
    baseline_bytes: int
    peaks: tuple[PhasePeak, ...]
    end_bytes: tuple[int, ...]  # live after each step of training, to tell a leak by
    stayed: tuple[Stayed, ...]  # what steps left behind
    timeline: MeasuredTimeline | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["peaks"] = [asdict(peak) for peak in self.peaks]
        told["stayed"] = [asdict(each) for each in self.stayed]
        told["timeline"] = None if self.timeline is None else _timeline_as_json(self.timeline)
        return told

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Report:
        timeline = told["timeline"]
        return cls(
            device=told["device"],
            kind=told["kind"],
            baseline_bytes=told["baseline_bytes"],
            peaks=tuple(PhasePeak(**peak) for peak in told["peaks"]),
            end_bytes=tuple(told["end_bytes"]),
            stayed=tuple(
                Stayed(**{**each, "shape": None if each["shape"] is None else tuple(each["shape"])})
                for each in told["stayed"]
            ),
            timeline=None if timeline is None else _timeline_of_json(timeline),
            notes=tuple(told["notes"]),
        )


def _timeline_as_json(timeline: MeasuredTimeline) -> dict[str, Any]:
    reserved = timeline.reserved_bytes
    return {
        "seconds": timeline.seconds.tolist(),
        "live_bytes": timeline.live_bytes.tolist(),
        "reserved_bytes": None if reserved is None else reserved.tolist(),
        "marks": [list(mark) for mark in timeline.marks],
        "spikes": [asdict(spike) for spike in timeline.spikes],
    }


def _timeline_of_json(told: dict[str, Any]) -> MeasuredTimeline:
    reserved = told["reserved_bytes"]
    return MeasuredTimeline(
        seconds=np.asarray(told["seconds"], dtype=np.float64),
        live_bytes=np.asarray(told["live_bytes"], dtype=np.int64),
        reserved_bytes=None if reserved is None else np.asarray(reserved, dtype=np.int64),
        marks=tuple((point, label) for point, label in told["marks"]),
        spikes=tuple(Spike(**{**spike, "place": Place(**spike["place"])}) for spike in told["spikes"]),
    )


RowLengths = tuple[tuple[int, ...], ...]  # the tokens of each row of each step; the last step's are repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model, loaded once, and the phases to run on it."""

    config: Config
    folder: ModelFolder
    trainable: bool  # loaded to be trained
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row that is evaluated, and of each prompt
    step_lengths: RowLengths
    num_steps: int  # of training: updates
    phases: tuple[Phase, ...]  # after loading
    device: str | None  # None: the one at hand
    records: bool  # memory over time, and the operators
    snapshot: Path | None  # where PyTorch's memory snapshot goes
    looks_for_leaks: bool = False

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        folder = asdict(self.folder)
        for name in ("path", "tokenizer_file"):
            folder[name] = None if folder[name] is None else str(folder[name])
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("config", "folder", "snapshot")}
        snapshot = None if self.snapshot is None else str(self.snapshot)
        config = self.config.model_dump(mode="json", exclude_unset=True)
        return {**fields, "config": config, "folder": folder, "snapshot": snapshot}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Request:
        folder = dict(fields["folder"])
        folder["path"] = Path(folder["path"])
        folder["tokenizer_file"] = None if folder["tokenizer_file"] is None else Path(folder["tokenizer_file"])
        snapshot = fields["snapshot"]
        return cls(
            **{
                **fields,
                "config": Config.model_validate_json(json.dumps(fields["config"])),
                "folder": ModelFolder(**folder),
                "snapshot": None if snapshot is None else Path(snapshot),
                "step_lengths": tuple(tuple(lengths) for lengths in fields["step_lengths"]),
                "phases": tuple(fields["phases"]),
            }
        )


def timeline(
    times_ns: NDArray[np.int64],
    live_bytes: NDArray[np.int64],
    *,
    reserved_bytes: NDArray[np.int64] | None,
    marks: Sequence[tuple[int, str]],
    place_at: Callable[[int], Place],
) -> MeasuredTimeline:
    """Points in the order of their times; a mark stands at the first point of its time or later.

    marks: (time in ns, what begins). place_at: where the work was at a time in ns.
    """
    order = np.argsort(times_ns, kind="stable")
    times_ns, live_bytes = times_ns[order], live_bytes[order]
    placed = [(int(np.searchsorted(times_ns, time_ns)), label) for time_ns, label in marks]
    placed = [(point, label) for point, label in placed if point < len(times_ns)]
    return MeasuredTimeline(
        seconds=(times_ns - times_ns[:1]) / 1e9,
        live_bytes=live_bytes,
        reserved_bytes=None if reserved_bytes is None else reserved_bytes[order],
        marks=tuple(placed),
        spikes=tuple(_spikes(times_ns, live_bytes, [point for point, _ in placed], place_at)),
    )


def _spikes(
    times_ns: NDArray[np.int64], live_bytes: NDArray[np.int64], starts: Sequence[int], place_at: Callable[[int], Place]
) -> list[Spike]:
    """The first highest point of each part that has points."""
    found = []
    for start, end in zip(starts, [*starts[1:], len(live_bytes)], strict=False):
        if start < end:
            point = start + int(np.argmax(live_bytes[start:end]))
            found.append(Spike(point=point, live_bytes=int(live_bytes[point]), place=place_at(int(times_ns[point]))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most that a phase took, and what was left after it."""

    phase: Phase
    step: int | None  # of training, from 1: the first one bears the optimizer's state
    allocated_bytes: int | None  # peak, as PyTorch's CUDA allocator counts; None on a CPU
    reserved_bytes: int | None  # peak; None on a CPU
    outside_bytes: int | None  # on the device, but not PyTorch's: context, libraries, other processes; None on a CPU
    total_bytes: int  # reserved + outside; on a CPU the peak resident set
    end_bytes: int  # at the phase's end: allocated; on a CPU resident
    baseline_bytes: int  # before the weights, in the process that ran the phase: resident, or outside PyTorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The highest point of one part of a timeline, and where it was."""

    point: int
    live_bytes: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline:
    """Memory over the steps: E points. On a CUDA device one after each allocation or release, else samples in time."""

    seconds: NDArray[np.float64]  # [E] since the first point
    live_bytes: NDArray[np.int64]  # [E]: allocated; on a CPU resident
    reserved_bytes: NDArray[np.int64] | None  # [E]; None on a CPU
    marks: tuple[tuple[int, str], ...]  # (point, what begins there), such as (0, "step 1: forward"); as in Timeline
    spikes: tuple[Spike, ...]  # one for each mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Stayed:
    """Tensors of one kind that steps left behind."""

    count: int
    num_bytes: int  # together
    shape: tuple[int, ...] | None  # None: not known
    dtype: str | None
    made_at: str  # a line of code or an operator; "" where it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Live bytes that rose from step to step."""

    bytes_per_step: int  # median rise
    end_bytes: tuple[int, ...]  # after each step that was looked at
    stayed: tuple[Stayed, ...]  # the largest first

    def __str__(self) -> str:
        steps = len(self.end_bytes) - 1
        return f"live bytes rose by {self.bytes_per_step:,} a step, {steps} times in a row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One workload on one device."""

    device: str  # its name; "cpu"
    kind: str  # cpu or cuda
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row; with generate, of each prompt
    num_layers: int  # of the model that the peaks are for
    layers_run: tuple[int, ...]  # what was run: (num_layers,), or the two depths that the peaks are extrapolated from
    baseline_bytes: int  # that of the first phase
    peaks: tuple[PhasePeak, ...]  # in the order of the phases; several of train, one a step
    timeline: MeasuredTimeline | None
    leak: Leak | None
    snapshot: Path | None  # PyTorch's memory snapshot, for pytorch.org/memory_viz
    notes: tuple[str, ...]  # what a reader of the figures has to know

    def peak(self, phase: Phase) -> PhasePeak:
        """The largest of a phase. Raises KeyError where it was not measured."""
        found = [each for each in self.peaks if each.phase == phase]
        if not found:
            raise KeyError(phase)
        return max(found, key=lambda each: each.allocated_bytes or each.total_bytes)

    def as_dict(self) -> dict[str, Any]:
        """All but the timeline, for JSON; the names are those of the attributes."""
        return {
            "device": self.device,
            "kind": self.kind,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "num_layers": self.num_layers,
            "layers_run": list(self.layers_run),
            "baseline_bytes": self.baseline_bytes,
            "peaks": [
                {
                    "phase": peak.phase,
                    "step": peak.step,
                    "allocated_bytes": peak.allocated_bytes,
                    "reserved_bytes": peak.reserved_bytes,
                    "outside_bytes": peak.outside_bytes,
                    "total_bytes": peak.total_bytes,
                    "end_bytes": peak.end_bytes,
                    "baseline_bytes": peak.baseline_bytes,
                }
                for peak in self.peaks
            ],
            "leak": None if self.leak is None else _leak(self.leak),
            "snapshot": None if self.snapshot is None else str(self.snapshot),
            "notes": list(self.notes),
        }


def _leak(leak: Leak) -> dict[str, Any]:
    return {
        "bytes_per_step": leak.bytes_per_step,
        "end_bytes": list(leak.end_bytes),
        "stayed": [
            {
                "count": each.count,
                "num_bytes": each.num_bytes,
                "shape": None if each.shape is None else list(each.shape),
                "dtype": each.dtype,
                "made_at": each.made_at,
            }
            for each in leak.stayed
        ],
    }
