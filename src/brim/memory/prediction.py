"""Hold the memory prediction of a run, and bound the shapes and devices that are predicted for.

Whatever exceeds the bounds is a typing error. They also keep what is counted within 63 bits, which fake tensors and the
simulated allocator's addresses need.

`predict` computes a prediction from a composed stream: it replays the stream in the simulated allocator, and compares
the peaks with what the device has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.memory.allocator import AllocatorSettings, CachingAllocator, Heap, Replay, SimulatedOutOfMemory, replay
from brim.memory.devices import Device
from brim.memory.events import CATEGORIES, Category, EventStream, Phase, Place
from brim.units import format_bytes, format_count

MOST_ROWS = 2**20


MOST_TOKENS = 2**31  # of a micro-batch, all rows together: the token ids alone take 16 GiB


MOST_GPUS = 2**16


MOST_MEMORY_BYTES = 2**50  # of a device


MOST_MADE_UP = 10_000_000  # rows of a made-up data set, planned for without data


Offload: TypeAlias = Literal["none", "optimizer", "weights"]  # what is kept on the CPU; weights: gradients, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Say what a prediction is for."""

    phase: Phase
    batch_size: int
    sequence_length: int
    world_size: int
    device: Device
    has_limit: bool  # False: the device is an example, and whether the run fits is not predicted
    allocator: AllocatorSettings
    choices: tuple[str, ...]


def predict(
    stream: EventStream,
    setting: Setting,
    replayed: Replay | None = None,
    *,
    cuda_streams: Sequence[int] | None = None,
) -> MemoryPrediction:
    """Predict what the stream takes.

    replayed: its replay with unlimited memory, if there is one already. cuda_streams: of each storage; None: all one.
    """
    replayed = replayed or replay_unlimited(stream, setting, cuda_streams)
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


def replay_unlimited(stream: EventStream, setting: Setting, cuda_streams: Sequence[int] | None = None) -> Replay:
    """Replay the stream on a device as large as it needs; settings that are shares of the device still hold."""
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
    inside, outside = ("for tensors", "for the process") if device.is_cpu else ("reserved by PyTorch", "outside it")
    needs = f"{format_bytes(total_bytes)}: {format_bytes(reserved_bytes)} {inside}"
    needs += f" and {format_bytes(device.outside_bytes)} {outside}"
    if not setting.has_limit:
        return None, f"it needs {needs}"
    has = f"{device.title} has {format_bytes(device.memory_bytes)}"
    fraction = setting.allocator.per_process_memory_fraction
    if total_bytes <= device.memory_bytes and reserved_bytes <= fraction * device.memory_bytes:
        left = format_bytes(device.memory_bytes - total_bytes)
        return True, f"it needs {needs}; {has}, so {left} are left"
    too_little = f"it needs {needs}; {has}, which is {format_bytes(total_bytes - device.memory_bytes)} too little"
    # What is allocated at one time must be reserved, however much PyTorch gives back.
    if device.is_cpu or int(replayed.allocated_bytes.max()) > device.budget_bytes:
        return False, too_little
    try:
        tight = CachingAllocator(
            settings=setting.allocator, capacity_bytes=device.budget_bytes, device_bytes=device.memory_bytes
        )
        replay(stream, tight, cuda_streams=cuda_streams)
    except SimulatedOutOfMemory:
        return False, too_little
    return (
        True,
        f"it would take {needs}; {has}, and it fits only because PyTorch gives cached blocks back, which is slow",
    )


def _step_peaks(stream: EventStream, replayed: Replay) -> tuple[int, ...]:
    """Return the allocated peak of each step, over its micro-batches and its update."""
    peaks: dict[str, int] = {}
    ends = [position for position, _ in stream.marks[1:]] + [len(stream.storages)]
    for (start, label), end in zip(stream.marks, ends, strict=True):
        step = label.split(",")[0].split(":")[0]
        if not step.startswith("step ") or end == start:
            continue
        peak = int(np.max(replayed.allocated_bytes[start:end]))
        peaks[step] = max(peak, peaks.get(step, 0))
    return tuple(peaks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Hold the live bytes over the predicted steps: E points, one after each allocation or release."""

    live_bytes: Mapping[Category, NDArray[np.int64]]  # each [E]
    reserved_bytes: NDArray[np.int64]  # [E]: what the caching allocator holds
    marks: tuple[tuple[int, str], ...]  # (point, what begins there), such as (0, "load"), (812, "step 1: forward")
    places: tuple[Place, ...]  # [E]

    def allocated_bytes(self) -> NDArray[np.int64]:
        """Return the sum of all categories: [E]."""
        total: NDArray[np.int64] = np.sum([self.live_bytes[name] for name in CATEGORIES], axis=0, dtype=np.int64)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Hold the memory that one phase takes on one device; bytes are as PyTorch's CUDA allocator counts them."""

    phase: Phase
    device: str  # as the catalogue or the user names it
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row; with `generate`, of each prompt
    world_size: int
    allocated_bytes: int  # peak
    reserved_bytes: int  # peak
    outside_bytes: int  # outside PyTorch's allocator: context, libraries
    total_bytes: int  # reserved + outside: what the device must have
    end_allocated_bytes: int  # after the last step, gradients dropped
    by_category: Mapping[Category, int]  # at the peak; they sum to allocated_bytes
    peak: Place
    step_peaks_bytes: tuple[int, ...]  # allocated peak of each simulated step; the first allocates optimizer state
    timeline: Timeline
    budget_bytes: int | None  # the device's memory; None: not known
    fits: bool | None
    reason: str  # one sentence with numbers
    choices: tuple[str, ...]  # each automatic choice, with its reason
    quantization_bits: int | None = None  # of the base model's weights; None: not quantised
    has_chunked_loss: bool = False  # logits and loss are computed for a few positions at a time
    gradient_checkpointing: bool | int | None = None  # of `train`; a number: of so many first layers
    is_packed: bool = False  # the rows are one sequence, without padding
    host_bytes: int = 0  # of the host's memory, of what is offloaded: weights, gradients, the optimizer's state
    other: MemoryPrediction | None = None  # the same run with or without gradient checkpointing, where that is open

    def __repr__(self) -> str:
        fits = "" if self.fits is None else ", fits" if self.fits else ", does not fit"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in self.by_category.items() if size
        )
        return (
            f"MemoryPrediction: {self.shape_in_words()}: {format_bytes(self.total_bytes)}{fits}\n"
            f"  at the peak {parts}\n"
            f"  {self.reason}"
        )

    def shape_in_words(self) -> str:
        """Name phase, rows and device: "train, 1 row × 2,048 tokens, on t4"."""
        return f"{self.batch_in_words()}, on {self.devices_in_words()}"

    def batch_in_words(self) -> str:
        """Name phase and rows: "train, 1 row × 2,048 tokens, packed"."""
        shape = f"{format_count(self.batch_size, 'row')} × {self.sequence_length:,} tokens"
        shape += ", packed" if self.is_packed else ""
        return f"{self.phase}, {'no rows' if self.phase == 'load' else shape}"

    def devices_in_words(self) -> str:
        """Name the devices: "2 × t4"."""
        return f"{self.world_size} × {self.device}" if self.world_size > 1 else self.device

    def as_dict(self) -> dict[str, Any]:
        """Return all but the timeline, for JSON; the names are those of the attributes."""
        brief = ("gradient_checkpointing", "allocated_bytes", "reserved_bytes", "total_bytes", "fits")
        return {
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name != "timeline"},
            "by_category": dict(self.by_category),
            "peak": asdict(self.peak),
            "step_peaks_bytes": list(self.step_peaks_bytes),
            "choices": list(self.choices),
            "other": None if self.other is None else {name: getattr(self.other, name) for name in brief},
        }
