"""From a composed stream to what it takes on a device: peaks, categories, whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from brim.memory.allocator import CachingAllocator, SimulatedOutOfMemory
from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.device import Device, budget_bytes
from brim.memory.events import CATEGORIES, EventStream
from brim.memory.heap import Heap
from brim.memory.prediction import MemoryPrediction, Phase, Timeline
from brim.memory.replay import Replay, replay
from brim.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a prediction is for."""

    phase: Phase
    batch_size: int
    sequence_length: int
    world_size: int
    device: Device
    has_limit: bool  # False: the device stands for its kind, and nothing is said of fitting
    allocator: AllocatorSettings
    choices: tuple[str, ...]


def predict(
    stream: EventStream,
    setting: Setting,
    replayed: Replay | None = None,
    *,
    cuda_streams: Sequence[int] | None = None,
) -> MemoryPrediction:
    """What the stream takes. replayed: without end, where that is known. cuda_streams: of each storage; None: one."""
    replayed = replayed or replay_without_end(stream, setting, cuda_streams)
    at = replayed.allocated_peak
    reserved_bytes = int(replayed.reserved_bytes.max())
    fits, reason = _verdict(stream, replayed, setting, cuda_streams)
    return MemoryPrediction(
        phase=setting.phase,
        device=setting.device.name,
        batch_size=setting.batch_size,
        sequence_length=setting.sequence_length,
        world_size=setting.world_size,
        allocated_bytes=int(replayed.allocated_bytes[at]),
        reserved_bytes=reserved_bytes,
        outside_bytes=setting.device.outside_bytes,
        total_bytes=reserved_bytes + setting.device.outside_bytes,
        end_allocated_bytes=int(replayed.allocated_bytes[-1]),
        by_category={category: int(replayed.live_bytes[category][at]) for category in CATEGORIES},
        peak=stream.places[at],
        step_peaks_bytes=_step_peaks(stream, replayed),
        timeline=Timeline(
            live_bytes=replayed.live_bytes,
            reserved_bytes=replayed.reserved_bytes,
            marks=tuple(stream.marks),
            places=tuple(stream.places),
        ),
        budget_bytes=setting.device.memory_bytes if setting.has_limit else None,
        fits=fits,
        reason=reason,
        choices=setting.choices,
    )


def replay_without_end(stream: EventStream, setting: Setting, cuda_streams: Sequence[int] | None = None) -> Replay:
    """What the stream would take of a device as large as it needs; settings that are shares of the device hold."""
    if setting.device.is_cpu:
        return replay(stream, Heap())
    device_bytes = setting.device.memory_bytes if setting.has_limit else None
    try:
        allocator = CachingAllocator(settings=setting.allocator, device_bytes=device_bytes)
        return replay(stream, allocator, cuda_streams=cuda_streams)
    except SimulatedOutOfMemory:
        unbounded = replace(setting.allocator, per_process_memory_fraction=1.0)
        return replay(stream, CachingAllocator(settings=unbounded), cuda_streams=cuda_streams)


def _verdict(
    stream: EventStream, replayed: Replay, setting: Setting, cuda_streams: Sequence[int] | None
) -> tuple[bool | None, str]:
    device = setting.device
    reserved_bytes = int(replayed.reserved_bytes.max())
    total_bytes = reserved_bytes + device.outside_bytes
    inside, outside = ("of tensors", "beside them") if device.is_cpu else ("reserved by PyTorch", "outside it")
    needs = f"{format_bytes(total_bytes)}: {format_bytes(reserved_bytes)} {inside}"
    needs += f" and {format_bytes(device.outside_bytes)} {outside}"
    if not setting.has_limit:
        return None, f"it needs {needs}"
    has = f"{device.title} has {format_bytes(device.memory_bytes)}"
    fraction = setting.allocator.per_process_memory_fraction
    if total_bytes <= device.memory_bytes and reserved_bytes <= fraction * device.memory_bytes:
        left = format_bytes(device.memory_bytes - total_bytes)
        return True, f"it needs {needs}; {has}, so {left} are left"
    too_little = f"it needs {needs}; {has}, {format_bytes(total_bytes - device.memory_bytes)} too little"
    # What is allocated at once is reserved at least, however much PyTorch gives back.
    if device.is_cpu or int(replayed.allocated_bytes.max()) > budget_bytes(device):
        return False, too_little
    try:
        tight = CachingAllocator(
            settings=setting.allocator, capacity_bytes=budget_bytes(device), device_bytes=device.memory_bytes
        )
        replay(stream, tight, cuda_streams=cuda_streams)
    except SimulatedOutOfMemory:
        return False, too_little
    return (
        True,
        f"it would take {needs}; {has}, and it fits only because PyTorch gives cached blocks back, which is slow",
    )


def _step_peaks(stream: EventStream, replayed: Replay) -> tuple[int, ...]:
    """The allocated peak of each step, over its micro-batches and its update."""
    peaks: dict[str, int] = {}
    ends = [position for position, _ in stream.marks[1:]] + [len(stream.storages)]
    for (start, label), end in zip(stream.marks, ends, strict=True):
        step = label.split(",")[0].split(":")[0]
        if not step.startswith("step ") or end == start:
            continue
        peak = int(np.max(replayed.allocated_bytes[start:end]))
        peaks[step] = max(peak, peaks.get(step, 0))
    return tuple(peaks.values())
