"""GPUs: how much memory one has, and what of it is not PyTorch's to reserve."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from brim.config.wording import nearest, show
from brim.errors import InputError, Problem
from brim.memory.device_catalogue import ALIASES, OUTSIDE_GIB, OUTSIDE_GIB_ELSEWHERE, ROWS
from brim.units import format_bytes

_MIB = 2**20
_GIB = 2**30
_BF16_FROM = (8, 0)  # compute capability
PACKING_BYTES = 6_000_000  # into which MKL packs matrices: docs/decisions/0010-resident-memory-on-a-cpu.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as a prediction sees it."""

    name: str  # "a100-80gb"; how the user names it
    title: str  # "NVIDIA A100 80GB"; for people
    memory_bytes: int  # as torch.cuda.get_device_properties(0).total_memory shows it
    capability: tuple[int, int] | None  # compute capability; None: not known
    outside_bytes: int  # the CUDA context and the modules loaded: PyTorch's allocator does not see them
    is_cpu: bool = False

    @property
    def has_bf16(self) -> bool:
        """Whether it is a GPU that computes bfloat16 in hardware; one of which only the memory is known is taken to."""
        return not self.is_cpu and (self.capability is None or self.capability >= _BF16_FROM)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What each cuBLAS handle takes from the caching allocator with its first matrix product, and keeps."""
        return cublas_workspace_bytes(self.capability)


def one_of_several(device: Device, world_size: int) -> Device:
    """The GPU with NCCL's buffers of one communicator outside PyTorch's allocator.

    544 MiB for two A100s that NVLink joins, 688 for more of them, measured (NVIDIA/nccl issue 964); less over PCIe.
    """
    if world_size == 1:
        return device
    nccl_bytes = (544 if world_size == 2 else 688) * _MIB
    return replace(device, outside_bytes=device.outside_bytes + nccl_bytes)


def budget_bytes(device: Device) -> int:
    """What a run may reserve on the device when nothing else runs there."""
    return device.memory_bytes - device.outside_bytes


def find_device(name: str) -> Device:
    """The device of a name such as "a100-80gb", "NVIDIA A100-SXM4-80GB", "rtx4090" or "cpu". Raises InputError."""
    key = _folded(name)
    if key == "cpu":
        return cpu_device()
    if key in _BY_KEY:
        return _BY_KEY[key]
    transposed = (other for other in _BY_KEY if sorted(other) == sorted(key) != [])
    meant = next(transposed, None) or nearest(key, _BY_KEY, at_least=0.65)
    raise InputError(
        Problem(
            what=f"unknown device {show(name)}",
            expected=f"cpu, or one of {', '.join(device.name for device in devices())}",
            fix=f"write {_BY_KEY[meant].name}" if meant else "give its memory instead, such as --memory 14GiB",
        )
    )


def cpu_device() -> Device:
    """The CPU at hand; what is outside the tensors is what this process has resident now, and what MKL will keep."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    statm = Path("/proc/self/statm")
    resident_bytes = int(statm.read_text(encoding="ascii").split()[1]) * page_bytes if statm.exists() else 0
    return Device(
        name="cpu",
        title="this machine",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes,
        capability=None,
        outside_bytes=resident_bytes + PACKING_BYTES,
        is_cpu=True,
    )


def device_of(memory_bytes: int) -> Device:
    """A GPU of which only the memory is known."""
    return Device(
        name=format_bytes(memory_bytes),
        title=f"a GPU with {format_bytes(memory_bytes)}",
        memory_bytes=memory_bytes,
        capability=None,
        outside_bytes=round(OUTSIDE_GIB_ELSEWHERE * _GIB),
    )


def device_named(title: str, *, memory_bytes: int, capability: tuple[int, int]) -> Device:
    """A GPU that is at hand, with what its driver says of it."""
    return Device(
        name=title,
        title=title,
        memory_bytes=memory_bytes,
        capability=capability,
        outside_bytes=_outside_bytes(capability),
    )


def devices() -> tuple[Device, ...]:
    """The catalogue."""
    return tuple(
        Device(
            name=name,
            title=title,
            memory_bytes=round(memory_gib * 1024) * _MIB,
            capability=capability,
            outside_bytes=_outside_bytes(capability),
        )
        for name, title, memory_gib, capability in ROWS
    )


def cublas_workspace_bytes(capability: tuple[int, int] | None, environment: Mapping[str, str] | None = None) -> int:
    """The workspace of one cuBLAS handle (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp).

    PyTorch keeps one for each handle and stream, and a handle for each thread: a training step has two, that of the
    forward pass and that of the thread that runs the backward pass. CUBLAS_WORKSPACE_CONFIG is `:KiB:count`, repeated.
    """
    config = (environment or {}).get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if pairs:
        return sum(int(kibibytes) * 1024 * int(count) for kibibytes, count in pairs)
    is_hopper_or_blackwell = capability is not None and capability[0] in (9, 10, 12)
    return 32 * _MIB if is_hopper_or_blackwell else 2 * 4096 * 1024 + 8 * 16 * 1024


def _outside_bytes(capability: tuple[int, int]) -> int:
    return round(OUTSIDE_GIB.get(capability, OUTSIDE_GIB_ELSEWHERE) * _GIB)


def _folded(name: str) -> str:
    """Letters and digits, without the words that every name of a card may have."""
    return re.sub(r"nvidia|geforce|tesla|quadro|graphics|rtx|[^a-z0-9]", "", name.lower())


def _by_key() -> dict[str, Device]:
    named = {device.name: device for device in devices()}
    keys = {_folded(device.name): device for device in named.values()}
    keys |= {_folded(device.title): device for device in named.values()}
    return keys | {_folded(alias): named[name] for alias, name in ALIASES.items()}


_BY_KEY = _by_key()
