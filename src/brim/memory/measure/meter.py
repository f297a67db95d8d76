"""The peaks that a device shows: PyTorch's own counters on CUDA, the resident set on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch

from brim.errors import BrimError, Problem
from brim.memory.measure.resident import (
    give_back,
    peak_resident_bytes,
    require_resident,
    reset_peak,
    resident_bytes,
)
from brim.memory.measure.result import PhasePeak
from brim.memory.prediction import Phase


class Meter(Protocol):
    """Reads one device."""

    kind: str  # cpu or cuda
    baseline_bytes: int  # before anything was put there

    def begin(self) -> None:
        """Forget the peak; what comes now counts."""

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        """The most since `begin`, and what is there now."""


def meter_of(device: torch.device) -> Meter:
    """The device's meter. Raises BrimError where it says nothing of its memory."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ResidentMeter()
    raise BrimError(
        Problem(
            what=f"memory cannot be measured on a device of the kind {device.type}",
            expected="a CUDA device, or a CPU under Linux",
            fix="leave out --measure: a prediction needs no device",
        )
    )


class CudaMeter:
    """Counts what PyTorch's caching allocator gave out and holds, and what of the card it does not hold.

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
    """Reads this process's resident set; free memory is given back before each phase, so that it counts once."""

    kind = "cpu"

    def __init__(self) -> None:
        require_resident()
        give_back()
        self.baseline_bytes = resident_bytes()

    def begin(self) -> None:
        reset_peak()

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        most = peak_resident_bytes()
        give_back()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=None,
            reserved_bytes=None,
            outside_bytes=None,
            total_bytes=most,
            end_bytes=resident_bytes(),
            baseline_bytes=self.baseline_bytes,
        )
