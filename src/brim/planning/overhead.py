"""What PyTorch's caching allocator needs beyond what is allocated, over steps of a plan's own shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from brim.memory.allocator import CachingAllocator, SimulatedOutOfMemory
from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.compose import compose_steps
from brim.memory.events import EventStream
from brim.memory.recording import Recording
from brim.memory.replay import replay
from brim.planning.memory_samples import round_length
from brim.planning.shape_cache import Shape
from brim.planning.traced_shapes import TracedShapes

MOST_SHAPES = 4  # each is a trace
_SHARES = (1.01, 1.02, 1.04, 1.06, 1.09, 1.13, 1.18, 1.25, 1.35)  # of the peak: capacities that are tried
_DEVICE_BYTES = 2**44  # expandable segments reserve address space by it
_GRAIN = 2 ** (1 / 8)  # padded tokens are rounded up to its powers, so that like plans meet the same shapes


def overhead_bytes(shapes: TracedShapes, used: Sequence[Shape]) -> int:
    """What must be free beyond what is allocated, so that steps of the shapes that take the most run. 0 on a CPU.

    Left alone, the allocator reserves more, up to half as much again: it keeps blocks that the next shape finds too
    small. With nothing left to reserve it gives back those that are whole, and goes on; so the least capacity with
    which it gets through counts. used: (rows, tokens) of the plan's micro-batches.
    """
    if shapes.device.is_cpu:
        return 0
    demanding = most_demanding(used)
    key = " ".join(f"{rows}x{tokens}" for rows, tokens in demanding) + f" {shapes.settings}"
    known = shapes.known.overheads_bytes
    if key not in known:
        recordings = [shapes.recording(rows, tokens) for rows, tokens in demanding]
        stream = compose_steps(_steps(recordings, shapes.micro_batches), shapes.optimizer)
        stream = shapes.on_device(stream, recordings[0])
        peak_bytes = int(shapes.live_bytes(stream).max())
        known[key] = least_capacity(stream, shapes.settings, peak_bytes=peak_bytes) - peak_bytes
        shapes.save()
    return known[key]


def least_capacity(stream: EventStream, settings: AllocatorSettings, *, peak_bytes: int) -> int:
    """Bytes with which the allocator gets through the stream, as with all larger ones that were tried.

    peak_bytes: allocated at the stream's peak.
    """
    settings = replace(settings, per_process_memory_fraction=1.0)
    alone = CachingAllocator(settings=settings, device_bytes=_DEVICE_BYTES)
    replay(stream, alone)
    tried = [round(share * peak_bytes) for share in _SHARES if share * peak_bytes < alone.peak_reserved_bytes]
    enough = alone.peak_reserved_bytes
    low, high = 0, len(tried)  # all from `high` on are enough
    while low < high:
        middle = (low + high) // 2
        if _gets_through(stream, settings, tried[middle]):
            enough, high = tried[middle], middle
        else:
            low = middle + 1
    return max(enough, peak_bytes)


def most_demanding(used: Sequence[Shape]) -> list[Shape]:
    """At most `MOST_SHAPES` of those with the most tokens, no two of about the same; the longest rows first."""
    longest = max(tokens for _, tokens in used)
    rounded: dict[Shape, None] = {}
    for rows, tokens in sorted(set(used), key=lambda shape: (shape[0] * shape[1], shape[1]), reverse=True):
        rounded[_rounded(rows, tokens, longest)] = None
    return sorted(list(rounded)[:MOST_SHAPES], key=lambda shape: (shape[1], shape[0]), reverse=True)


def _rounded(rows: int, tokens: int, longest: int) -> Shape:
    """A shape that stands for all of about its length and number of tokens, never one of fewer tokens."""
    length = min(round_length(tokens), longest)
    if rows == 1:
        return 1, length
    power = math.ceil(round(math.log(rows * tokens, _GRAIN), 6))
    return math.ceil(round(_GRAIN**power / length, 6)), length


def _steps(recordings: Sequence[Recording], micro_batches: int) -> list[list[Recording]]:
    """A step without the shape that takes the most, then one with it, as the rows come."""
    if micro_batches == 1:
        return [[recording] for recording in reversed(recordings)]
    return [
        list(recordings[1:]) or [recordings[0]] * 2,
        list(recordings) if len(recordings) > 1 else [recordings[0]] * 2,
    ]


def _gets_through(stream: EventStream, settings: AllocatorSettings, capacity_bytes: int) -> bool:
    allocator = CachingAllocator(settings=settings, capacity_bytes=capacity_bytes, device_bytes=capacity_bytes)
    try:
        replay(stream, allocator)
    except SimulatedOutOfMemory:
        return False
    return True
