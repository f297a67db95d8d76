"""Read the memory of a device: the most since a mark, and what is there now.

On CUDA the figures are PyTorch's own counters; on a CPU they are the resident set of this process, as Linux counts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

from brim.batching.memory import ResidentPeak, free_caches
from brim.errors import BrimError
from brim.memory.events import Phase
from brim.workflows.measure.messages import PhasePeak


class Meter(Protocol):
    """Read the memory of one device."""

    kind: str  # cpu or cuda
    baseline_bytes: int  # before anything was put there

    def begin(self) -> None:
        """Forget the peak: what is allocated from now on counts."""

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        """Return the most since `begin`, and what is there now."""


def meter_of(device: torch.device) -> Meter:
    """Return the device's meter. Raises BrimError where its memory cannot be measured."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ResidentMeter()
    raise BrimError(
        what=f"memory cannot be measured on a device of the kind {device.type}",
        expected="a CUDA device, or a CPU under Linux",
        fix="leave out --measure: a prediction needs no device",
    )


class CudaMeter:
    """Count the bytes that PyTorch's allocator has allocated and reserved, and those of the card that it does not hold.

    The last is read as the card's used memory less PyTorch's reserved, so it counts other processes, too.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros((), device=device)  # makes the context
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.baseline_bytes = self._outside_bytes()

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        torch.cuda.synchronize(self._device)
        reserved, outside = torch.cuda.max_memory_reserved(self._device), self._outside_bytes()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=reserved,
            outside_bytes=outside,
            total_bytes=reserved + outside,
            end_bytes=torch.cuda.memory_allocated(self._device),
            baseline_bytes=self.baseline_bytes,
        )

    def _outside_bytes(self) -> int:
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)


class ResidentMeter:
    """Read this process's resident set; freed memory is returned before each phase, so that it counts once."""

    kind = "cpu"

    def __init__(self) -> None:
        if not Path("/proc/self/clear_refs").exists():
            raise BrimError(
                what="memory cannot be measured on this machine's CPU",
                expected="Linux, with /proc/self/status and /proc/self/clear_refs",
                fix="leave out --measure: a prediction needs no device; or measure on a CUDA device",
            )
        self._most = ResidentPeak()
        free_caches()
        self.baseline_bytes = _resident_bytes()

    def begin(self) -> None:
        self._most.begin()

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        peak_bytes = self._most.peak_bytes()
        free_caches()
        return PhasePeak(
            phase=phase,
            step=step,
            total_bytes=peak_bytes,
            end_bytes=_resident_bytes(),
            baseline_bytes=self.baseline_bytes,
        )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
