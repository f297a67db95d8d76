"""The budget of a run: what the configuration allows, and what the device at hand has free."""

from __future__ import annotations

from brim.batching.peak_meter import peak_meter
from brim.config.schema import MemoryConfig
from brim.memory.device import Device
from brim.planning.budget import Budget
from brim.units import format_bytes, parse_bytes


def budget_of(memory: MemoryConfig, device: Device, *, is_at_hand: bool) -> Budget:
    """memory: the configuration's section. is_at_hand: the run takes place on this device, and what is free counts."""
    import torch

    whole, reason = device.memory_bytes, f"{device.title} has {format_bytes(device.memory_bytes)}"
    if is_at_hand:
        free = peak_meter(torch.device("cpu" if device.is_cpu else "cuda")).limit_bytes()
        if free is not None and free < whole:
            whole, reason = free, "what is free"
    limit = whole
    if isinstance(memory.budget, float):
        limit, reason = int(memory.budget * device.memory_bytes), "memory.budget"
    elif memory.budget != "auto":
        limit, reason = parse_bytes(memory.budget), "memory.budget"
    margin, why = max(limit // 50, 64 << 20), "2%, at least 64 MiB"
    if isinstance(memory.margin, float):
        margin, why = int(memory.margin * limit), "memory.margin"
    elif memory.margin != "auto":
        margin, why = parse_bytes(memory.margin), "memory.margin"
    return Budget(
        device=device.name,
        limit_bytes=limit,
        outside_bytes=device.outside_bytes,
        margin_bytes=margin,
        limit_reason=reason,
        margin_reason=why,
    )
