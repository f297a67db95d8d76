"""Run a stream of births and deaths through a simulated allocator: live and reserved bytes after each event.

On a CPU the allocator is a `Heap`: what is allocated is resident, and what is freed is gone. That is how it is where
the C library maps each tensor by itself (docs/decisions/0010-resident-memory-on-a-cpu.md). `Heap` has those parts of
`CachingAllocator` that a replay needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.memory.allocator.simulator import CachingAllocator, SimulatedOutOfMemory
from brim.memory.events import CATEGORIES, Category, EventStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Hold the bytes after each of E events; blocks that lived before the stream began are not in `live_bytes`."""

    live_bytes: Mapping[Category, NDArray[np.int64]]  # each [E]; the blocks' sizes, which PyTorch counts as allocated
    allocated_bytes: NDArray[np.int64]  # [E]: all categories
    reserved_bytes: NDArray[np.int64]  # [E]
    block_bytes: NDArray[np.int64]  # of each storage

    @property
    def allocated_peak(self) -> int:
        """Return the first event after which the allocated bytes are at their peak."""
        return int(np.argmax(self.allocated_bytes))


def replay(
    stream: EventStream, allocator: CachingAllocator | Heap, *, cuda_streams: Sequence[int] | None = None
) -> Replay:
    """Allocate and free as the stream says; what is alive at its end stays allocated.

    cuda_streams: the CUDA stream that each storage is allocated on; all on one if not given.
    Raises SimulatedOutOfMemory, with the event's index, when the allocator has a capacity that does not suffice.
    """
    sizes = stream.sizes
    malloc, free = allocator.malloc, allocator.free
    handles = [0] * len(sizes)
    allocated_bytes: list[int] = [allocator.allocated_bytes]
    reserved_bytes: list[int] = []
    note_allocated, note_reserved = allocated_bytes.append, reserved_bytes.append
    try:
        for storage in stream.storages:
            if storage < 0:
                free(handles[~storage])
            else:
                handles[storage] = malloc(sizes[storage], cuda_streams[storage] if cuda_streams else 0)
            note_allocated(allocator.allocated_bytes)
            note_reserved(allocator.reserved_bytes)
    except SimulatedOutOfMemory as error:
        error.event = len(reserved_bytes)
        raise
    allocated = np.array(allocated_bytes, dtype=np.int64)
    return _summary(stream, allocated[1:] - allocated[:-1], np.array(reserved_bytes, dtype=np.int64))


def _summary(stream: EventStream, change: NDArray[np.int64], reserved_bytes: NDArray[np.int64]) -> Replay:
    """Sum up, by category, what the events changed: running totals."""
    storages = np.array(stream.storages, dtype=np.int64)
    is_birth = storages >= 0
    which = np.where(is_birth, storages, ~storages)
    block_bytes = np.zeros(len(stream.sizes), dtype=np.int64)
    block_bytes[storages[is_birth]] = change[is_birth]
    number = {category: index for index, category in enumerate(CATEGORIES)}
    category_of = np.array([number[category] for category in stream.categories], dtype=np.int8)[which]
    return Replay(
        live_bytes={
            category: np.cumsum(np.where(category_of == index, change, 0)) for category, index in number.items()
        },
        allocated_bytes=np.cumsum(change),
        reserved_bytes=reserved_bytes,
        block_bytes=block_bytes,
    )


class Heap:
    """Allocate blocks of exactly the size that is requested."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._sizes: list[int] = [0]

    @property
    def reserved_bytes(self) -> int:
        """Return the allocated bytes: nothing is kept for later."""
        return self.allocated_bytes

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """Allocate a block, and return its handle."""
        self.allocated_bytes += num_bytes
        self._sizes.append(num_bytes)
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        """Give a block back."""
        self.allocated_bytes -= self._sizes[handle]
