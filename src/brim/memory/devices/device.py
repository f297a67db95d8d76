"""Describe devices: their memory, the part of it that PyTorch cannot reserve, and how fast they are.

The catalogue of common GPUs has memory as PyTorch shows it, compute capability, and memory outside PyTorch. Speeds are
peaks of the data sheets, and the share of them that is reached.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from brim.config.text import nearest, show
from brim.errors import InputError
from brim.memory.events import Unit
from brim.units import format_bytes

if TYPE_CHECKING:
    import torch

_MIB = 2**20
_GIB = 2**30
_BF16_FROM = (8, 0)  # compute capability
PACKING_BYTES = 6_000_000  # buffers into which MKL packs matrices: docs/decisions/0010-resident-memory-on-a-cpu.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Describe a GPU, or the CPU, as a prediction sees it."""

    name: str  # "a100-80gb"; how the user names it
    title: str  # "NVIDIA A100 80GB"; for people
    memory_bytes: int  # as torch.cuda.get_device_properties(0).total_memory shows it
    capability: tuple[int, int] | None  # compute capability; None: not known
    outside_bytes: int  # the CUDA context and the modules loaded, which PyTorch's allocator does not see
    is_cpu: bool = False
    num_processes: int = 1  # of one run, which share a CPU's memory

    @property
    def has_bf16(self) -> bool:
        """Return whether it is a GPU that computes bfloat16 in hardware; one of unknown capability counts as such."""
        return self.gpu_capability is not None and self.gpu_capability >= _BF16_FROM

    @property
    def gpu_capability(self) -> tuple[int, int] | None:
        """Return the compute capability to count with, 8.0 where it is not known; None: it is a CPU."""
        return None if self.is_cpu else self.capability or _BF16_FROM

    @property
    def cublas_workspace_bytes(self) -> int:
        """Return what each cuBLAS handle takes from the caching allocator with its first matrix product, and keeps."""
        return cublas_workspace_bytes(self.capability)

    @property
    def budget_bytes(self) -> int:
        """Return what a run may reserve on the device when nothing else runs there."""
        return self.memory_bytes - self.outside_bytes

    def among(self, world_size: int) -> Device:
        """Return the device as one of several; a CPU is shared by so many processes.

        NCCL's buffers lie outside PyTorch's allocator. They were measured as 544 MiB for two A100s that NVLink joins,
        688 for more (NVIDIA/nccl issue 964); less over PCIe.
        """
        if world_size == 1 or self.is_cpu:
            return replace(self, num_processes=world_size)
        nccl_bytes = (544 if world_size == 2 else 688) * _MIB
        return replace(self, outside_bytes=self.outside_bytes + nccl_bytes)


def find_device(name: str) -> Device:
    """Find the device by a name such as "a100-80gb", "NVIDIA A100-SXM4-80GB", "rtx4090" or "cpu". Raises InputError."""
    key = _folded(name)
    if key == "cpu":
        return cpu_device()
    if key in _BY_KEY:
        return _BY_KEY[key]
    transposed = (other for other in _BY_KEY if sorted(other) == sorted(key) != [])
    meant = next(transposed, None) or nearest(key, _BY_KEY, at_least=0.65)
    raise InputError(
        what=f"unknown device {show(name)}",
        expected=f"cpu, or one of {', '.join(device.name for device in devices())}",
        fix=f"write {_BY_KEY[meant].name}" if meant else "give its memory instead, such as --memory 14GiB",
    )


def cpu_device() -> Device:
    """Describe this machine's CPU; outside the tensors are what the process has resident now and what MKL will keep."""
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
    """Describe a GPU of which only the memory is known."""
    return Device(
        name=format_bytes(memory_bytes),
        title=f"a GPU with {format_bytes(memory_bytes)}",
        memory_bytes=memory_bytes,
        capability=None,
        outside_bytes=round(OUTSIDE_GIB_ELSEWHERE * _GIB),
    )


def device_at_hand(device: torch.device) -> Device:
    """Describe the device that torch runs on; a GPU other than CUDA's counts as a CPU."""
    if device.type != "cuda":
        return cpu_device()
    import torch

    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor)
    return Device(
        name=found.name,
        title=found.name,
        memory_bytes=found.total_memory,
        capability=capability,
        outside_bytes=_outside_bytes(capability),
    )


def devices() -> tuple[Device, ...]:
    """Return the catalogue."""
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


def cublas_workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Return the bytes of one cuBLAS handle's workspace (parseChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp).

    PyTorch keeps one for each handle and stream, and a handle for each thread: a training step has two, one of the
    forward pass's thread and one of the backward pass's. CUBLAS_WORKSPACE_CONFIG is taken to be unset.
    """
    is_hopper_or_blackwell = capability is not None and capability[0] in (9, 10, 12)
    return 32 * _MIB if is_hopper_or_blackwell else 2 * 4096 * 1024 + 8 * 16 * 1024


def _outside_bytes(capability: tuple[int, int]) -> int:
    return round(OUTSIDE_GIB.get(capability, OUTSIDE_GIB_ELSEWHERE) * _GIB)


def _folded(name: str) -> str:
    """Return letters and digits, without the words that any card's name may have."""
    return re.sub(r"nvidia|geforce|tesla|quadro|graphics|rtx|[^a-z0-9]", "", name.lower())


def _by_key() -> dict[str, Device]:
    named = {device.name: device for device in devices()}
    keys = {_folded(device.name): device for device in named.values()}
    keys |= {_folded(device.title): device for device in named.values()}
    return keys | {_folded(alias): named[name] for alias, name in ALIASES.items()}


# Name, title, GiB of memory, compute capability.
#
# The memory is what cudaMemGetInfo and torch.cuda.get_device_properties(0).total_memory give, which is less than the
# nominal figure: ECC and the driver take a part, newer drivers more than older ones. The figures are the lowest that
# was found, on Linux, in public output: out-of-memory messages of PyTorch ("GPU 0 has a total capacity of 14.56 GiB")
# and printed _CudaDeviceProperties(…, total_memory=…). Where it is marked "as …" none was found: the figure is that of
# a card for which nvidia-smi shows the same memory.
ROWS: tuple[tuple[str, str, float, tuple[int, int]], ...] = (
    ("t4", "NVIDIA T4", 14.56, (7, 5)),  # older drivers: 14.74
    ("v100-16gb", "NVIDIA V100 16GB", 15.75, (7, 0)),  # 16130 MiB
    ("v100-32gb", "NVIDIA V100 32GB", 31.73, (7, 0)),
    ("a10", "NVIDIA A10", 22.05, (8, 6)),  # as the A10G: nvidia-smi gives 23028 MiB for both
    ("a10g", "NVIDIA A10G", 22.05, (8, 6)),  # 22587 MiB
    ("a30", "NVIDIA A30", 23.62, (8, 0)),  # nominal 24 GiB less 1.6%, as with the similar A100 40GB
    ("a40", "NVIDIA A40", 44.35, (8, 6)),  # 45416 MiB
    ("a100-40gb", "NVIDIA A100 40GB", 39.38, (8, 0)),
    ("a100-80gb", "NVIDIA A100 80GB", 79.14, (8, 0)),  # also 79.15, 79.25
    ("l4", "NVIDIA L4", 22.03, (8, 9)),  # the message does not name the card
    ("l40", "NVIDIA L40", 44.40, (8, 9)),
    ("l40s", "NVIDIA L40S", 44.39, (8, 9)),
    ("rtx-2080ti", "NVIDIA GeForce RTX 2080 Ti", 10.76, (7, 5)),
    ("rtx-3060", "NVIDIA GeForce RTX 3060 12GB", 11.62, (8, 6)),
    ("rtx-3070", "NVIDIA GeForce RTX 3070", 7.78, (8, 6)),
    ("rtx-3080", "NVIDIA GeForce RTX 3080 10GB", 9.78, (8, 6)),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", 23.56, (8, 6)),  # older drivers: 23.69
    ("rtx-4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", 15.57, (8, 9)),  # as the RTX 4070 Ti SUPER
    ("rtx-4070", "NVIDIA GeForce RTX 4070", 11.56, (8, 9)),
    ("rtx-4070ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", 15.57, (8, 9)),
    ("rtx-4080", "NVIDIA GeForce RTX 4080", 15.57, (8, 9)),  # as the RTX 4070 Ti SUPER
    ("rtx-4090", "NVIDIA GeForce RTX 4090", 23.52, (8, 9)),  # older drivers: 23.64
    ("rtx-5060ti-16gb", "NVIDIA GeForce RTX 5060 Ti 16GB", 15.47, (12, 0)),  # 15841 MiB
    ("rtx-5080", "NVIDIA GeForce RTX 5080", 15.47, (12, 0)),  # as the RTX 5060 Ti 16GB
    ("rtx-5090", "NVIDIA GeForce RTX 5090", 31.36, (12, 0)),
    ("rtx-a4000", "NVIDIA RTX A4000", 15.57, (8, 6)),  # as the RTX 4070 Ti SUPER
    ("rtx-a5000", "NVIDIA RTX A5000", 23.55, (8, 6)),  # 24114 MiB
    ("rtx-a6000", "NVIDIA RTX A6000", 47.40, (8, 6)),  # older drivers: 47.54
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 47.40, (8, 9)),  # older driver: 48622 MiB
    ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", 94.97, (12, 0)),
    ("h100-80gb", "NVIDIA H100 80GB", 79.18, (9, 0)),  # 81082 MiB, SXM
    ("h100-pcie", "NVIDIA H100 PCIe", 79.11, (9, 0)),  # 81008 MiB
    ("h100-nvl", "NVIDIA H100 NVL", 92.63, (9, 0)),  # 99456909312 bytes
    ("gh200-96gb", "NVIDIA GH200 96GB", 94.50, (9, 0)),  # the message does not name the card
    ("h200", "NVIDIA H200", 139.72, (9, 0)),
    ("b200", "NVIDIA B200", 178.35, (10, 0)),
)


# Where a name leaves the memory open, it means the card that is rented most; the prediction says which one it took.
ALIASES: dict[str, str] = {
    "v100": "v100-16gb",
    "v100-sxm2-16gb": "v100-16gb",
    "v100-pcie-16gb": "v100-16gb",
    "v100-sxm2-32gb": "v100-32gb",
    "v100-pcie-32gb": "v100-32gb",
    "a100": "a100-80gb",
    "a100-80": "a100-80gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-80gb-pcie": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "2080ti": "rtx-2080ti",
    "rtx-3060-12gb": "rtx-3060",
    "rtx-4060ti": "rtx-4060ti-16gb",
    "rtx-5060ti": "rtx-5060ti-16gb",
    "a4000": "rtx-a4000",
    "a5000": "rtx-a5000",
    "a6000": "rtx-a6000",
    "6000-ada": "rtx-6000-ada",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000",
    "h100": "h100-80gb",
    "h100-80gb-hbm3": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h100-sxm5": "h100-80gb",
    "gh200": "gh200-96gb",
    "gh200-480gb": "gh200-96gb",
    "h200-141gb": "h200",
}


# GiB that a process of PyTorch holds besides what the caching allocator reserved: the CUDA context, the modules and
# kernels loaded, cuBLAS's and cuDNN's own. These are typical of public out-of-memory messages, which give the process's
# memory, the allocated and the reserved bytes (CUDA 12, where kernels are loaded when first used). A local card is
# measured instead; other libraries (NCCL, bitsandbytes) and a display add to it.
OUTSIDE_GIB: dict[tuple[int, int], float] = {
    (7, 0): 0.38,  # V100: 0.38
    (7, 5): 0.16,  # T4: 0.11, 0.11, 0.12, 0.15, 0.16
    (8, 0): 0.53,  # A100: 0.48, 0.51, 0.51, 0.53, and 0.80 and 1.00 with more libraries
    (8, 6): 0.34,  # RTX 3060, 3090, A6000: 0.24, 0.31, 0.32; 48 GB cards: 0.30, 0.34
    (8, 9): 0.50,  # RTX 4090, L40: 0.43, 0.46, 0.46, 0.50, 0.57
    (9, 0): 0.65,  # H100, H200: 0.51, 0.59, 0.59, 0.65, 0.73
    (10, 0): 0.70,  # B200: 0.70
    (12, 0): 0.50,  # RTX 5090: 0.49
}


OUTSIDE_GIB_ELSEWHERE = 0.65  # for a card that is not known: the largest of the above except the B200's


_BY_KEY = _by_key()


# TFLOP/s in fp32 without tensor cores, in TF32, in fp16 and bf16 (dense, sums in fp32, which GeForce cards do at half
# the rate of sums in fp16), and GB/s of memory. From NVIDIA's data sheets (T4, V100, A10, A30, A40, A100, L4, L40,
# L40S, H100, GH200, H200, RTX A4000 to A6000, RTX 6000 Ada; B200: one GPU of a DGX B200) and whitepapers of the
# architectures (Turing, GA102, Ada, RTX Blackwell); a figure that is given with sparsity is halved. The A10G's figures
# are AWS's. For cards that are in no whitepaper: multiprocessors × boost clock × what one does in a cycle by its
# architecture. None: no tensor cores for the type.
_PEAKS: Mapping[str, tuple[float, float | None, float, float]] = {
    "t4": (8.1, None, 65, 320),
    "v100-16gb": (15.7, None, 125, 900),
    "v100-32gb": (15.7, None, 125, 900),
    "a10": (31.2, 62.5, 125, 600),
    "a10g": (31.5, 35, 70, 600),
    "a30": (10.3, 82, 165, 933),
    "a40": (37.4, 74.8, 149.7, 696),
    "a100-40gb": (19.5, 156, 312, 1555),
    "a100-80gb": (19.5, 156, 312, 2039),
    "l4": (30.3, 60, 121, 300),
    "l40": (90.5, 90.5, 181, 864),
    "l40s": (91.6, 183, 362, 864),
    "rtx-2080ti": (13.4, None, 53.8, 616),
    "rtx-3060": (12.7, 12.7, 25.5, 360),
    "rtx-3070": (20.3, 20.3, 40.6, 448),
    "rtx-3080": (29.8, 29.8, 59.5, 760),
    "rtx-3090": (35.6, 35.6, 71, 936),
    "rtx-4060ti-16gb": (22.1, 22.1, 44.1, 288),
    "rtx-4070": (29.1, 29.1, 58.3, 504),
    "rtx-4070ti-super": (44.1, 44.1, 88.2, 672),
    "rtx-4080": (48.7, 48.7, 97.5, 717),
    "rtx-4090": (82.6, 82.6, 165.2, 1008),
    "rtx-5060ti-16gb": (23.7, 23.7, 47.4, 448),
    "rtx-5080": (56.3, 56.3, 112.6, 960),
    "rtx-5090": (104.8, 104.8, 209.5, 1792),
    "rtx-a4000": (19.2, 38.3, 76.7, 448),
    "rtx-a5000": (27.8, 55.6, 111.1, 768),
    "rtx-a6000": (38.7, 77.4, 154.8, 768),
    "rtx-6000-ada": (91.1, 182.1, 364.2, 960),
    "rtx-pro-6000": (125, 251.9, 503.8, 1792),
    "h100-80gb": (67, 494.5, 989, 3350),
    "h100-pcie": (51, 378, 756, 2000),
    "h100-nvl": (60, 417.5, 835.5, 3900),
    "gh200-96gb": (67, 494.5, 989, 4000),
    "h200": (67, 494.5, 989, 4800),
    "b200": (80, 1125, 2250, 8000),
}


# The share of a peak that matrix products reach at the best shape: maximum achievable matmul FLOPS of the "Machine
# Learning Engineering" book (github.com/stas00/ml-engineering, compute/accelerator): A100 SXM 86.9%, A100 PCIe 81.1%,
# H100 and H200 80.3%, GH200 83.8%, B200 77.6%. A card that is not in that table takes the A100 PCIe's.
_MATRIX_SHARE: Mapping[tuple[int, int], float] = {(8, 0): 0.869, (9, 0): 0.803, (10, 0): 0.776}


_MATRIX_SHARE_ELSEWHERE = 0.811


# FlashAttention 2 on an A100 reaches 50 to 73% forward and up to 63% backward with head dimension 128 and causal
# attention of 2k to 16k tokens, and on an H100 about 35% (Dao, 2023, section 4.1; Shah et al., FlashAttention-3, 2024).
_ATTENTION_SHARE: Mapping[tuple[int, int], float] = {(9, 0): 0.35, (10, 0): 0.35}


_ATTENTION_SHARE_ELSEWHERE = 0.55


# A copy within an H100's memory reaches 2,903 of 3,350 GB/s (github.com/aigatech/vpbenchmarking); the triad benchmark
# on an A100 comes as near to its peak.
_MEMORY_SHARE = 0.867


# Forward and backward pass of Llamas with 12 and 24 layers and tiny tensors (width 32, one row of 4 tokens), full and
# with LoRA, on a core of an EPYC at 2.6 GHz: 7.9 to 12.1 µs a kernel, spent in Python, dispatcher and autograd.
_HOST_S_A_KERNEL = 10e-6


# The shortest time that a kernel occupies a GPU, its start and its end included.
_LEAST_S_A_KERNEL = 2e-6


# For a CPU that was not measured: two AVX2 units of 8 fp32 multiply-adds at 2.5 GHz, of which 80% is reached; and one
# channel of memory for several cores.
_CPU_FLOPS_A_CORE = 0.8 * 2 * 2 * 8 * 2.5e9


_CPU_BYTES_A_SECOND = 10e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Hold the speed that a device reaches. Kernels of a GPU are started by the host while earlier ones run."""

    name: str
    source: str  # where the figures come from, for people
    flops_by_dtype: Mapping[str, float]  # FLOP/s of matrix products; of attention: `attention_share` of the peak's
    attention_share: float  # of the speed of matrix products
    bytes_per_s: float
    host_s_per_kernel: float
    least_s_per_kernel: float
    is_asynchronous: bool

    def flops_per_s(self, unit: Unit, dtype: str) -> float:
        """Return the speed of arithmetic in this dtype; a dtype that is not known is as fast as the slowest."""
        speed = self.flops_by_dtype.get(dtype, min(self.flops_by_dtype.values()))
        return speed * (self.attention_share if unit == "attention" else 1.0)


def device_speed(device: Device, *, num_cores: int = 1, tf32: bool = False) -> DeviceSpeed:
    """Return a device's speed by its name; if it is not in the catalogue, that of the one most like it, and say so.

    num_cores: those that PyTorch uses, on a CPU. tf32: torch.backends.cuda.matmul.allow_tf32.
    """
    if device.is_cpu:
        return nominal_cpu(num_cores)
    known = _known(device)
    like = known or _most_like(device)
    source = f"data sheet of the {like.title}" + ("" if known else ", the known GPU that is most like it")
    return _of_catalogue(like, source=source, tf32=tf32)


def nominal_cpu(num_cores: int) -> DeviceSpeed:
    """Return the speed of a CPU of which only the number of cores is known: right to a factor of two or three."""
    flops = _CPU_FLOPS_A_CORE * num_cores
    return cpu_speed(flops, _CPU_BYTES_A_SECOND * min(num_cores, 4), source=f"a nominal CPU of {num_cores} cores")


def cpu_speed(fp32_flops_per_s: float, bytes_per_s: float, *, source: str) -> DeviceSpeed:
    """Return a CPU's speed from two figures. Half precision counts as no faster, since few CPUs have units for it."""
    return DeviceSpeed(
        name="cpu",
        source=source,
        flops_by_dtype=MappingProxyType({"float32": fp32_flops_per_s, "float64": fp32_flops_per_s / 2}),
        attention_share=0.5,
        bytes_per_s=bytes_per_s,
        host_s_per_kernel=_HOST_S_A_KERNEL,
        least_s_per_kernel=0.0,
        is_asynchronous=False,
    )


def _known(device: Device) -> Device | None:
    try:
        return find_device(device.name)
    except InputError:
        return None


def _most_like(device: Device) -> Device:
    """Find the GPU nearest in memory, of the same architecture if one is known; of equals the catalogue's first."""
    alike = [each for each in devices() if each.capability == device.capability] or list(devices())
    return min(alike, key=lambda each: abs(each.memory_bytes - device.memory_bytes))


def _of_catalogue(device: Device, *, source: str, tf32: bool) -> DeviceSpeed:
    fp32, tf32_peak, half, gigabytes = _PEAKS[device.name]
    capability = device.capability
    assert capability is not None, "the catalogue has it for every GPU"
    share = _MATRIX_SHARE.get(capability, _MATRIX_SHARE_ELSEWHERE)
    attention = _ATTENTION_SHARE.get(capability, _ATTENTION_SHARE_ELSEWHERE)
    has_bf16 = capability >= (8, 0)
    peaks = {
        "float32": tf32_peak if tf32 and tf32_peak is not None else fp32,
        "float16": half,
        "bfloat16": half if has_bf16 else fp32,
        "int8": 2 * half if capability >= (7, 5) else 4 * fp32,
        "float64": fp32 / 64,
    }
    return DeviceSpeed(
        name=device.name,
        source=source,
        flops_by_dtype=MappingProxyType({dtype: share * peak * 1e12 for dtype, peak in peaks.items()}),
        attention_share=attention / share,
        bytes_per_s=_MEMORY_SHARE * gigabytes * 1e9,
        host_s_per_kernel=_HOST_S_A_KERNEL,
        least_s_per_kernel=_LEAST_S_A_KERNEL,
        is_asynchronous=True,
    )
