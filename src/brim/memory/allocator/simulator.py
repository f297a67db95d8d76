"""Simulate PyTorch's caching allocator for CUDA: what a sequence of requests allocates and reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`), PyTorch 2.10 to 2.13: the numbers
that `torch.cuda.memory_allocated`, `memory_reserved` and their peaks would report for the same requests in the same
order. docs/decisions/0006-the-allocator-is-simulated.md says what is left out.

A stream of births and deaths is replayed through it: live and reserved bytes after each event. On a CPU the allocator
is a `Heap`: what is allocated is resident, and what is freed is gone. That is how it is where the C library maps each
tensor by itself (docs/decisions/0010-resident-memory-on-a-cpu.md); it has those parts of `CachingAllocator` that a
replay needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.memory.allocator.pool import BlockPool, ExpandableSegments
from brim.memory.allocator.settings import AllocatorSettings
from brim.memory.events import CATEGORIES, Category, EventStream
from brim.units import format_bytes

_MIB = 2**20


_GRAIN = 512  # kMinBlockSize: every size is a multiple of this


_SMALL = _MIB  # kSmallSize: the largest request that comes from the small pool


_SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer


_LARGE_FROM = 10 * _MIB  # kMinLargeAlloc: from here a request has a segment of its own


_LARGE_STEP = 2 * _MIB  # kRoundLarge: the sizes of such segments are multiples of this


_POOL_SHIFT = 56  # a block's pool is read off its address


class SimulatedOutOfMemory(Exception):
    """Report a request that the device has no memory for, even after everything cached was given back."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, allowed_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.allowed_bytes = allowed_bytes
        self.event: int | None = None  # of the stream that was replayed
        super().__init__(
            f"out of memory: {format_bytes(requested_bytes)} requested, {format_bytes(allocated_bytes)} allocated, "
            f"{format_bytes(reserved_bytes)} reserved, {format_bytes(allowed_bytes)} allowed"
        )


class CachingAllocator:
    """Hand out blocks of device memory by handle; all figures are in bytes.

    `allocated_bytes`, `reserved_bytes`, their peaks and `num_retries` are to be read, not set. Requests of different
    streams never share a block.

    capacity_bytes: what the driver can give, None for no limit. device_bytes: the device's memory, of which
    `per_process_memory_fraction` is a fraction (the capacity if not given).
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self._settings = settings or AllocatorSettings()
        self._capacity_bytes = capacity_bytes
        total_bytes = capacity_bytes if device_bytes is None else device_bytes
        fraction = self._settings.per_process_memory_fraction
        limited = fraction < 1 and total_bytes is not None
        self._allowed_bytes = int(fraction * total_bytes) if limited and total_bytes is not None else None
        self._collects = self._allowed_bytes is not None and self._settings.garbage_collection_threshold > 0
        self._plain_rounding = not any(count > 1 for count in self._settings.roundup_power2_divisions)
        self._max_split_bytes = self._settings.max_split_bytes
        self._expandable = ExpandableSegments(total_bytes) if self._settings.expandable_segments else None
        self._plain_search = self._expandable is None and self._max_split_bytes is None and not self._collects
        self._pools: list[BlockPool] = []  # small and large of stream 0, small and large of stream 1, …
        self._large_requests = 0  # the clock of the garbage collection
        self._returned_at: dict[int, int] = {}  # address of a cached whole segment -> the clock when it was freed
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._add_pools(0)

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """Allocate a block, and return its handle; 0, which is not one, for no bytes. Raises SimulatedOutOfMemory."""
        if num_bytes <= 0:
            return 0
        size = (num_bytes + _GRAIN - 1) & -_GRAIN if self._plain_rounding else self._settings.rounded_bytes(num_bytes)
        try:
            pool = self._pools[2 * stream + (size > _SMALL)]
        except IndexError:
            self._add_pools(stream)
            pool = self._pools[2 * stream + (size > _SMALL)]
        if self._plain_search:
            address = pool.take(size) or self._from_device(pool, size)
        else:
            address = self._from_cache(pool, size) or self._from_device(pool, size)
        self.allocated_bytes += pool.live[address]
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return address

    def free(self, handle: int) -> None:
        """Give a block back to the cache."""
        if not handle:
            return
        pool = self._pools[handle >> _POOL_SHIFT]
        self.allocated_bytes -= pool.live[handle]
        address, size = pool.put(handle)
        if self._collects and not pool.is_small and pool.segments.get(address) == size:
            self._returned_at[address] = self._large_requests

    def block_bytes(self, handle: int) -> int:
        """Return what a live block counts for in `allocated_bytes`: its own size, not the request's."""
        return self._pools[handle >> _POOL_SHIFT].live[handle] if handle else 0

    def empty_cache(self) -> None:
        """Give back whole free segments, or whole free pages of expandable ones, as torch.cuda.empty_cache does."""
        for pool in self._pools:
            if self._expandable is not None:
                self.reserved_bytes -= self._expandable.unmap_free_pages(pool)
            else:
                for address, _ in pool.whole_free_segments():
                    self._release(pool, address)

    def _add_pools(self, stream: int) -> None:
        while len(self._pools) < 2 * stream + 2:
            is_small = len(self._pools) % 2 == 0
            # should_split: a small block leaves 512 bytes or more, a large one more than 1 MiB.
            fine = is_small or self._expandable is not None
            pool = BlockPool(
                first_address=(len(self._pools) << _POOL_SHIFT) + _GRAIN,
                is_small=is_small,
                smallest_rest=_GRAIN if fine else _SMALL + _GRAIN,
            )
            self._pools.append(pool)
            if self._expandable is not None:
                page_bytes = _SMALL_SEGMENT if is_small else self._settings.large_segment_bytes
                self._expandable.add_pool(pool, page_bytes)

    def _from_cache(self, pool: BlockPool, size: int) -> int:
        """Take a free block as get_free_block does with settings that restrict its choice; 0: there is none."""
        if self._collects and not pool.is_small:
            self._large_requests += 1
        index = pool.index_from(size)
        if index == len(pool.free):
            return 0
        if self._expandable is not None:
            index = self._expandable.best_fit(pool, index)
        address, block_size = pool.block_at(index)
        smallest_rest = pool.smallest_rest
        if self._max_split_bytes is not None:
            if size < self._max_split_bytes <= block_size:
                return 0
            if size >= self._max_split_bytes:
                if block_size >= size + self._settings.max_non_split_rounding_bytes:
                    return 0
                smallest_rest = self._rest_to_split(pool, size)
        self._returned_at.pop(address, None)
        return pool.carve(index, size, smallest_rest)

    def _rest_to_split(self, pool: BlockPool, size: int) -> int:
        """Return how much must be left over for a block to be split; where it never is, more than there can be."""
        never = self._max_split_bytes is not None and size >= self._max_split_bytes
        return 1 << 62 if never and pool.smallest_rest > _GRAIN else pool.smallest_rest

    def _from_device(self, pool: BlockPool, size: int) -> int:
        """Allocate from the device as alloc_block does, with its retries. Raises SimulatedOutOfMemory."""
        if self._collects:
            self._collect_garbage()
        segment_bytes = self._segment_bytes(size)
        address = self._new_block(pool, size, segment_bytes)
        if not address and self._release_for(pool, size):
            address = self._new_block(pool, size, segment_bytes)
        if not address:
            self.empty_cache()
            self.num_retries += 1
            address = self._new_block(pool, size, segment_bytes)
        if not address:
            raise self._out_of_memory(segment_bytes)
        return address

    def _segment_bytes(self, size: int) -> int:
        """Return what is requested from the device for a block of `size` bytes (get_allocation_size)."""
        if size <= _SMALL:
            return _SMALL_SEGMENT
        if size < _LARGE_FROM:
            return self._settings.large_segment_bytes
        return -(-size // _LARGE_STEP) * _LARGE_STEP

    def _new_block(self, pool: BlockPool, size: int, segment_bytes: int) -> int:
        """Make a block in new memory of the device; 0: the device has none left."""
        if self._allowed_bytes is not None and self.reserved_bytes + segment_bytes > self._allowed_bytes:
            return 0
        if self._expandable is not None:
            free_bytes = None if self._capacity_bytes is None else self._capacity_bytes - self.reserved_bytes
            address, added_bytes = self._expandable.extend(pool, size, free_bytes)
        elif self._capacity_bytes is not None and self.reserved_bytes + segment_bytes > self._capacity_bytes:
            return 0
        else:
            address, added_bytes = pool.add_segment(segment_bytes), segment_bytes
        self.reserved_bytes += added_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        if not address:
            return 0
        return pool.carve(pool.index_of(address), size, self._rest_to_split(pool, size))

    def _release_for(self, pool: BlockPool, size: int) -> bool:
        """Give back just enough oversize blocks, with max_split_size_mb (release_available_cached_blocks)."""
        if self._max_split_bytes is None or self._expandable is not None:
            return False
        needed = max(size, self._max_split_bytes)
        index = pool.index_from(needed)
        if index < len(pool.free):
            self._release(pool, pool.block_at(index)[0])
            return True
        released = 0
        while released < needed and pool.free:
            address, block_size = pool.block_at(len(pool.free) - 1)
            if block_size < self._max_split_bytes:
                break
            self._release(pool, address)
            released += block_size
        return released >= needed

    def _collect_garbage(self) -> None:
        """Give back whole cached segments, the oldest first, above the threshold (garbage_collect_cached_blocks)."""
        assert self._allowed_bytes is not None
        threshold = int(self._settings.garbage_collection_threshold * self._allowed_bytes)
        target = self.reserved_bytes - threshold
        if target <= 0:
            return
        cached = [
            (pool, address, size, self._large_requests - self._returned_at.get(address, 0))
            for pool in self._pools
            if not pool.is_small and self._expandable is None
            for address, size in pool.whole_free_segments()
        ]
        reclaimed, found = 0, True
        while cached and reclaimed < target and found:
            mean_age = sum(age for *_, age in cached) / len(cached)
            old = [block for block in cached if block[3] >= mean_age]
            cached = [block for block in cached if block[3] < mean_age]
            found = bool(old)
            for pool, address, size, _ in old:
                self._release(pool, address)
                reclaimed += size

    def _release(self, pool: BlockPool, address: int) -> None:
        self._returned_at.pop(address, None)
        self.reserved_bytes -= pool.drop_segment(address)

    def _out_of_memory(self, requested_bytes: int) -> SimulatedOutOfMemory:
        limits = [limit for limit in (self._capacity_bytes, self._allowed_bytes) if limit is not None]
        return SimulatedOutOfMemory(
            requested_bytes=requested_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            allowed_bytes=min(limits),
        )


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
