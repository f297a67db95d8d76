"""What was measured. Torch-free, so that a report needs none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.memory.events import Place
from brim.memory.prediction import Phase


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
