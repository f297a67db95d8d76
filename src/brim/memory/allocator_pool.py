"""The free blocks of one stream and one size class: best fit by (size, address), neighbours joined when freed.

Boundary tags: a free block is found by its start and by its end, so that freeing looks at two dictionary entries.
Segments lie at least 512 bytes apart, so that blocks of different segments are never neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ADDRESS_BITS = 64
_ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class BlockPool:
    """Blocks of one pool; sizes and addresses in bytes, multiples of 512."""

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
        """The smallest free block that has `size` bytes, split if worth it; its address, or 0 if there is none."""
        index = bisect_left(self.free, size << ADDRESS_BITS)
        if index == len(self.free):
            return 0
        return self.carve(index, size, self.smallest_rest)

    def carve(self, index: int, size: int, smallest_rest: int) -> int:
        """Make the first `size` bytes of free block `index` live, or all of it when less would be left over."""
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
        """Free a live block and join it with its free neighbours; address and size of what came out."""
        size = self.live.pop(address)
        return self.insert(address, size)

    def insert(self, address: int, size: int) -> tuple[int, int]:
        """Add free memory and join it with its free neighbours; address and size of what came out."""
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
        """Take a free block out whole, without making it live; its size."""
        size = self.starts.pop(address)
        del self.ends[address + size]
        del self.free[bisect_left(self.free, size << ADDRESS_BITS | address)]
        return size

    def index_of(self, address: int) -> int:
        """The position of a free block in `free`."""
        return bisect_left(self.free, self.starts[address] << ADDRESS_BITS | address)

    def index_from(self, size: int) -> int:
        """The position of the smallest free block that has `size` bytes; len(free) if there is none."""
        return bisect_left(self.free, size << ADDRESS_BITS)

    def block_at(self, index: int) -> tuple[int, int]:
        """Address and size of free block `index`."""
        key = self.free[index]
        return key & _ADDRESS_MASK, key >> ADDRESS_BITS

    def blocks(self) -> list[tuple[int, int]]:
        """Address and size of each free block, ascending by size."""
        return [(key & _ADDRESS_MASK, key >> ADDRESS_BITS) for key in self.free]

    def add_segment(self, size: int) -> int:
        """A new segment, free as one block; its address."""
        address = self.next_address
        self.next_address += size + 512
        self.segments[address] = size
        self.insert(address, size)
        return address

    def whole_free_segments(self) -> list[tuple[int, int]]:
        """Address and size of each segment that is one free block, ascending by size."""
        segments = self.segments
        return [(address, size) for address, size in self.blocks() if segments.get(address) == size]

    def drop_segment(self, address: int) -> int:
        """Give a segment that is one free block back; its size."""
        del self.segments[address]
        return self.remove(address)
