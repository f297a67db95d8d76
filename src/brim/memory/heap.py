"""The memory of a CPU: what is allocated is resident, and what is freed is gone.

So it is where the C library maps each tensor by itself (docs/decisions/0010-resident-memory-on-a-cpu.md). The class has
the parts of `CachingAllocator` that a replay asks for.
"""

from __future__ import annotations


class Heap:
    """Blocks of the size that was asked for."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._sizes: list[int] = [0]

    @property
    def reserved_bytes(self) -> int:
        """Nothing is kept for later."""
        return self.allocated_bytes

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """A block; its handle."""
        self.allocated_bytes += num_bytes
        self._sizes.append(num_bytes)
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        """Give a block back."""
        self.allocated_bytes -= self._sizes[handle]
