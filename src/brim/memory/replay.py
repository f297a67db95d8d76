"""Run a stream of births and deaths through the simulated allocator: what is live and reserved after each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.memory.allocator import CachingAllocator, SimulatedOutOfMemory
from brim.memory.events import CATEGORIES, Category, EventStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Bytes after each of E events. Blocks that lived before the stream began are not in `live_bytes`."""

    live_bytes: Mapping[Category, NDArray[np.int64]]  # each [E]; the blocks' sizes, which PyTorch counts as allocated
    allocated_bytes: NDArray[np.int64]  # [E]: all categories
    reserved_bytes: NDArray[np.int64]  # [E]
    block_bytes: NDArray[np.int64]  # of each storage

    @property
    def allocated_peak(self) -> int:
        """The first event after which most is allocated."""
        return int(np.argmax(self.allocated_bytes))

    @property
    def reserved_peak(self) -> int:
        """The first event after which most is reserved."""
        return int(np.argmax(self.reserved_bytes))


def replay(stream: EventStream, allocator: CachingAllocator, *, cuda_streams: Sequence[int] | None = None) -> Replay:
    """Allocate and free as the stream says; what is alive at its end stays so in the allocator.

    cuda_streams: the CUDA stream that each storage is allocated on; all on one if not given.
    Raises SimulatedOutOfMemory, with the event's index, when the allocator has a capacity that does not suffice.
    """
    sizes, storages = stream.sizes, stream.storages
    malloc, free, block_bytes_of = allocator.malloc, allocator.free, allocator.block_bytes
    handles = [0] * len(sizes)
    block_bytes = [0] * len(sizes)
    reserved_bytes: list[int] = []
    note = reserved_bytes.append
    event = 0
    try:
        for storage in storages:
            if storage < 0:
                free(handles[~storage])
            else:
                handle = malloc(sizes[storage], cuda_streams[storage]) if cuda_streams else malloc(sizes[storage])
                handles[storage] = handle
                block_bytes[storage] = block_bytes_of(handle)
            note(allocator.reserved_bytes)
            event += 1
    except SimulatedOutOfMemory as error:
        error.event = event
        raise
    return _summary(stream, np.array(block_bytes, dtype=np.int64), np.array(reserved_bytes, dtype=np.int64))


def _summary(stream: EventStream, block_bytes: NDArray[np.int64], reserved_bytes: NDArray[np.int64]) -> Replay:
    """Running sums of the blocks' sizes by category."""
    storages = np.array(stream.storages, dtype=np.int64)
    dies = storages < 0
    which = np.where(dies, ~storages, storages)
    change = np.where(dies, -block_bytes[which], block_bytes[which])
    number = {category: index for index, category in enumerate(CATEGORIES)}
    category_of = np.array([number[category] for category in stream.categories], dtype=np.int8)[which]
    live_bytes = {category: np.cumsum(np.where(category_of == index, change, 0)) for category, index in number.items()}
    return Replay(
        live_bytes=live_bytes,
        allocated_bytes=np.cumsum(change),
        reserved_bytes=reserved_bytes,
        block_bytes=block_bytes,
    )
