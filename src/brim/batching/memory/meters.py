"""Read the most memory that was in use on a device since a mark, and how much there can be."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import torch

from brim.batching.memory.oom import free_caches

Counts: TypeAlias = Literal["reserved", "allocated"]


_STATUS = Path("/proc/self/status")


_CLEAR_REFS = Path("/proc/self/clear_refs")


_MEMINFO = Path("/proc/meminfo")


_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


_FORGET_PEAK = "5"  # proc(5): VmHWM becomes what is resident now


class PeakMeter(Protocol):
    """Read the memory in use on one device."""

    def begin(self) -> None:
        """Free what nobody uses and forget the peak; what comes now counts."""

    def peak_bytes(self) -> int | None:
        """Return the most since `begin`; None: the device does not say."""

    def limit_bytes(self) -> int | None:
        """Return what the peak may reach as things stand; None: not known."""


def peak_meter(device: torch.device, *, counts: Counts = "reserved") -> PeakMeter:
    """Return the device's meter. counts: on CUDA, what PyTorch's allocator holds, or what of it tensors take."""
    if device.type == "cuda":
        return CudaPeak(device, counts)
    if device.type == "cpu" and _CLEAR_REFS.exists():
        return ResidentPeak() if _address_space_limit() is None else AddressSpacePeak()
    return NoPeak()


class NoPeak:
    """Stand in for a device that does not say what it uses."""

    def begin(self) -> None: ...

    def peak_bytes(self) -> int | None:
        return None

    def limit_bytes(self) -> int | None:
        return None


class CudaPeak:
    """Read the caching allocator's counters. Reserved bytes are those that can run out."""

    def __init__(self, device: torch.device, counts: Counts) -> None:
        self._device, self._counts = device, counts

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        free_caches()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        most = torch.cuda.max_memory_reserved if self._counts == "reserved" else torch.cuda.max_memory_allocated
        return most(self._device)

    def limit_bytes(self) -> int:
        """Return what is free, and what PyTorch holds already."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


class ResidentPeak:
    """Read this process's resident set, as Linux counts it."""

    def begin(self) -> None:
        free_caches()
        _forget_peak()

    def peak_bytes(self) -> int:
        return _status("VmHWM")

    def limit_bytes(self) -> int:
        """Return what the machine has available beside this process's own; a container's limit, where it is lower."""
        found = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMINFO.read_text(encoding="ascii"), re.MULTILINE)
        assert found is not None, "every Linux since 3.14 has it"
        available = int(found[1]) * 1024 + _status("VmRSS")
        container = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.exists() else "max"
        return available if container == "max" else min(available, int(container))


class AddressSpacePeak:
    """Read this process's address space, under RLIMIT_AS.

    Linux keeps its peak, VmPeak, from the process's start on. While a stretch stays below an earlier peak, its own is
    what was mapped before it and by how much the resident set rose: tensors are written to, so they are resident.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        free_caches()
        _forget_peak()
        self._mapped, self._resident, self._peak = _status("VmSize"), _status("VmRSS"), _status("VmPeak")

    def peak_bytes(self) -> int:
        peak = _status("VmPeak")
        risen = self._mapped + max(_status("VmHWM") - self._resident, 0)
        return peak if peak > self._peak else min(peak, risen)

    def limit_bytes(self) -> int | None:
        return _address_space_limit()


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "every Linux has it"
    return int(found[1]) * 1024


def _forget_peak() -> None:
    _CLEAR_REFS.write_text(_FORGET_PEAK, encoding="ascii")


def _address_space_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
