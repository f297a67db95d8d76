"""The device at hand and what it can do."""

from __future__ import annotations

import resource
import sys

import torch

from brim.config import DeviceFacts


def pick_device() -> torch.device:
    """The accelerator that torch sees, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def device_facts(device: torch.device) -> DeviceFacts:
    """What decides an `auto`: the kind of device, and whether its arithmetic has bf16 in hardware."""
    if device.type == "cuda":
        return DeviceFacts(kind="cuda", bf16=torch.cuda.get_device_capability(device) >= (8, 0))
    if device.type == "mps":
        return DeviceFacts(kind="mps", bf16=False)
    return DeviceFacts(kind="cpu", bf16=False)


def device_name(device: torch.device) -> str:
    """The device's name, for the run's record."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a CUDA device, resident in this process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(resident if sys.platform == "darwin" else resident * 1024)
