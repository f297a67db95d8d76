"""Say how fast a device computes, moves bytes and starts kernels: peaks of the data sheets, and the share reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from brim.errors import InputError
from brim.memory.devices.device import Device, devices, find_device
from brim.memory.events import Unit

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
