"""Hold the free blocks of one stream and one size class: best fit by (size, address), joined when freed.

Boundary tags: a free block is found by its start and by its end, so that freeing looks at two dictionary entries.
Segments lie at least 512 bytes apart, so that blocks of different segments are never neighbours.

Expandable segments are simulated, too: address space that is reserved once and given memory page by page, as with
PyTorch's `expandable_segments:True` (`ExpandableSegment` in c10/cuda/CUDACachingAllocator.cpp). A page has 2 MiB in
the small pool and, by default, 20 MiB in the large one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_ENDLESS_BYTES = 2**52  # address space of a segment where the device's memory is not known


@dataclass(slots=True)
class _Space:
    """Hold the address space of one pool."""

    page_bytes: int
    holes: dict[int, int] = field(default_factory=dict)  # address of a range without memory -> its size
    hole_ends: dict[int, int] = field(default_factory=dict)  # address after it -> its address
    order: list[int] = field(default_factory=list)  # addresses of the holes, ascending

    def add(self, address: int, size: int) -> None:
        """Add a range that has lost its memory, and join it with the holes beside it."""
        end = address + size
        left = self.hole_ends.pop(address, None)
        if left is not None:
            self._forget(left)
            address = left
        if end in self.holes:
            right_size = self.holes[end]
            self._forget(end)
            del self.hole_ends[end + right_size]
            end += right_size
        self.holes[address] = end - address
        self.hole_ends[end] = address
        insort(self.order, address)

    def fill(self, address: int, size: int) -> None:
        """Give memory to the first `size` bytes of a hole."""
        rest = self.holes[address] - size
        end = address + size + rest
        self._forget(address)
        del self.hole_ends[end]
        if rest:
            self.holes[address + size] = rest
            self.hole_ends[end] = address + size
            insort(self.order, address + size)

    def _forget(self, address: int) -> None:
        del self.holes[address]
        del self.order[bisect_left(self.order, address)]


class ExpandableSegments:
    """Supply memory to pools whose segments grow. device_bytes: the device's memory, if known."""

    __slots__ = ("_device_bytes", "_spaces")

    def __init__(self, device_bytes: int | None) -> None:
        self._device_bytes = device_bytes
        self._spaces: dict[int, _Space] = {}

    def add_pool(self, pool: BlockPool, page_bytes: int) -> None:
        """Begin to serve a pool."""
        self._spaces[id(pool)] = _Space(page_bytes)

    def best_fit(self, pool: BlockPool, index: int) -> int:
        """Return the index of the best free block from `index` on, the smallest that is large enough.

        A block that can grow counts as large as it can become.
        """
        holes = self._spaces[id(pool)].holes

        def reach(position: int) -> int:
            address, size = pool.block_at(position)
            return size + holes.get(address + size, 0)

        while index + 1 < len(pool.free) and reach(index + 1) < reach(index):
            index += 1
        return index

    def extend(self, pool: BlockPool, size: int, free_bytes: int | None) -> tuple[int, int]:
        """Make a free block of at least `size` bytes by adding pages; return its address and the bytes added.

        The address is 0 where memory does not suffice; pages that were added before it ran out stay.
        free_bytes: what the device has left; None: no limit.
        """
        space = self._spaces[id(pool)]
        address = self._candidate(pool, space, size)
        added = 0
        if address in space.holes:
            needed = min(space.holes[address], size)
            address, added = self._map(pool, space, address, needed, free_bytes)
        while address and pool.starts[address] < size:
            block_size = pool.starts[address]
            hole = address + block_size
            left = None if free_bytes is None else free_bytes - added
            address, mapped = self._map(pool, space, hole, min(size - block_size, space.holes[hole]), left)
            added += mapped
        return address, added

    def unmap_free_pages(self, pool: BlockPool) -> int:
        """Take the memory of every page that is wholly free, and return how many bytes went back."""
        space = self._spaces[id(pool)]
        released = 0
        for address, size in pool.blocks():
            base = self._base(pool, address)
            first = base + -(-(address - base) // space.page_bytes) * space.page_bytes
            last = base + (address + size - base) // space.page_bytes * space.page_bytes
            if first >= last:
                continue
            pool.remove(address)
            space.add(first, last - first)
            if first > address:
                pool.insert(address, first - address)
            if address + size > last:
                pool.insert(last, address + size - last)
            released += last - first
        self._drop_empty_segments(pool, space)
        return released

    def _candidate(self, pool: BlockPool, space: _Space, size: int) -> int:
        """Return the lowest address from which `size` bytes are free or without memory (find_expandable_block)."""
        for hole in space.order:
            start = pool.ends.get(hole, hole)
            end = start
            while end - start < size:
                step = space.holes.get(end) or pool.starts.get(end)
                if step is None:
                    break
                end += step
            if end - start >= size:
                return start
        return self._new_segment(pool, space)

    def _new_segment(self, pool: BlockPool, space: _Space) -> int:
        needed = _ENDLESS_BYTES if self._device_bytes is None else self._device_bytes * 9 // 8
        size = -(-needed // space.page_bytes) * space.page_bytes
        address = pool.next_address
        pool.next_address += size + 512
        pool.segments[address] = size
        space.add(address, size)
        return address

    def _map(self, pool: BlockPool, space: _Space, hole: int, size: int, free_bytes: int | None) -> tuple[int, int]:
        """Give memory to the beginning of a hole, in whole pages; return the free block around it, and the bytes."""
        mapped = -(-size // space.page_bytes) * space.page_bytes
        if free_bytes is not None and mapped > free_bytes:
            return 0, 0
        space.fill(hole, mapped)
        return pool.insert(hole, mapped)[0], mapped

    def _base(self, pool: BlockPool, address: int) -> int:
        """Return the address of the segment that a block lies in; there is rarely more than one segment."""
        return max(base for base in pool.segments if base <= address)

    def _drop_empty_segments(self, pool: BlockPool, space: _Space) -> None:
        for base, size in list(pool.segments.items()):
            if space.holes.get(base) == size:
                space.fill(base, size)
                del pool.segments[base]


ADDRESS_BITS = 64


_ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class BlockPool:
    """Hold the blocks of one pool; sizes and addresses are in bytes, multiples of 512."""

    __slots__ = ("ends", "free", "is_small", "live", "next_address", "segments", "smallest_rest", "starts")

    def __init__(self, *, first_address: int, is_small: bool, smallest_rest: int) -> None:
        self.is_small = is_small
        self.smallest_rest = smallest_rest  # a block is split when at least this much is left over
        self.next_address = first_address  # of the next segment
        self.segments: dict[int, int] = {}  # address -> size
        self.live: dict[int, int] = {}  # address -> size
        self.starts: dict[int, int] = {}  # address of a free block -> its size
        self.ends: dict[int, int] = {}  # address after a free block -> its address
        self.free: list[int] = []  # size << ADDRESS_BITS | address of each free block, ascending

    def take(self, size: int) -> int:
        """Take the smallest free block that has `size` bytes, split if worth it; return its address, 0: none."""
        index = bisect_left(self.free, size << ADDRESS_BITS)
        if index == len(self.free):
            return 0
        return self.carve(index, size, self.smallest_rest)

    def carve(self, index: int, size: int, smallest_rest: int) -> int:
        """Make the first `size` bytes of free block `index` live, or all of it if less than `smallest_rest` is left."""
        free, starts, ends = self.free, self.starts, self.ends
        key = free[index]
        address = key & _ADDRESS_MASK
        rest = (key >> ADDRESS_BITS) - size
        del starts[address]
        if rest >= smallest_rest:
            rest_address = address + size
            starts[rest_address] = rest
            ends[rest_address + rest] = rest_address
            key = rest << ADDRESS_BITS | rest_address
            position = bisect_left(free, key, 0, index)
            if position == index:
                free[index] = key
            else:
                del free[index]
                free.insert(position, key)
        else:
            del free[index]
            size += rest
            del ends[address + size]
        self.live[address] = size
        return address

    def put(self, address: int) -> tuple[int, int]:
        """Free a live block and join it with its free neighbours; return address and size of the joined block."""
        size = self.live.pop(address)
        return self.insert(address, size)

    def insert(self, address: int, size: int) -> tuple[int, int]:
        """Add free memory and join it with its free neighbours; return address and size of the joined block."""
        free, starts, ends = self.free, self.starts, self.ends
        end = address + size
        left = ends.pop(address, 0)
        if left:
            del free[bisect_left(free, (address - left) << ADDRESS_BITS | left)]
            address = left
        right_size = starts.pop(end, 0)
        if right_size:
            del free[bisect_left(free, right_size << ADDRESS_BITS | end)]
            end += right_size
        size = end - address
        starts[address] = size
        ends[end] = address
        insort(free, size << ADDRESS_BITS | address)
        return address, size

    def remove(self, address: int) -> int:
        """Take out a whole free block without making it live, and return its size."""
        size = self.starts.pop(address)
        del self.ends[address + size]
        del self.free[bisect_left(self.free, size << ADDRESS_BITS | address)]
        return size

    def index_of(self, address: int) -> int:
        """Return the position of a free block in `free`."""
        return bisect_left(self.free, self.starts[address] << ADDRESS_BITS | address)

    def index_from(self, size: int) -> int:
        """Return the position of the smallest free block that has `size` bytes; len(free) if there is none."""
        return bisect_left(self.free, size << ADDRESS_BITS)

    def block_at(self, index: int) -> tuple[int, int]:
        """Return address and size of free block `index`."""
        key = self.free[index]
        return key & _ADDRESS_MASK, key >> ADDRESS_BITS

    def blocks(self) -> list[tuple[int, int]]:
        """Return address and size of each free block, ascending by size."""
        return [(key & _ADDRESS_MASK, key >> ADDRESS_BITS) for key in self.free]

    def add_segment(self, size: int) -> int:
        """Add a segment, free as one block, and return its address."""
        address = self.next_address
        self.next_address += size + 512
        self.segments[address] = size
        self.insert(address, size)
        return address

    def whole_free_segments(self) -> list[tuple[int, int]]:
        """Return address and size of each segment that is one free block, ascending by size."""
        segments = self.segments
        return [(address, size) for address, size in self.blocks() if segments.get(address) == size]

    def drop_segment(self, address: int) -> int:
        """Give back a segment that is one free block, and return its size."""
        del self.segments[address]
        return self.remove(address)
