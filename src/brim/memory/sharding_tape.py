"""Write the stream of one rank: what is kept of a recorded stream, and what sharding adds to it."""

from __future__ import annotations

from collections.abc import Iterable

from brim.memory.events import Category, EventStream, Place

COMPUTE, GATHER, REDUCE, COPY = 0, 1, 2, 3  # CUDA streams: each has blocks of its own in the caching allocator


class Tape:
    """An event stream that grows, with the CUDA stream on which each storage is allocated."""

    def __init__(self) -> None:
        self.stream = EventStream()
        self.cuda_streams: list[int] = []  # of each storage
        self._phase = ""
        self._layer: int | None = None

    def stand_at(self, phase: str, layer: int | None) -> None:
        """Where the next events of sharding happen."""
        self._phase, self._layer = phase, layer

    def allocate(self, num_bytes: int, category: Category, operator: str, *, cuda_stream: int = COMPUTE) -> int:
        """The birth of a storage that sharding adds; its number."""
        self.cuda_streams.append(cuda_stream)
        return self.stream.birth(num_bytes, category, self._place(operator))

    def repeat(self, num_bytes: int, category: Category, place: Place) -> int:
        """The birth of a storage that was recorded; its number."""
        self.cuda_streams.append(COMPUTE)
        return self.stream.birth(num_bytes, category, place)

    def free(self, storages: Iterable[int], operator: str) -> None:
        """The deaths of storages."""
        place = self._place(operator)
        for storage in storages:
            self.stream.death(storage, place)

    def _place(self, operator: str) -> Place:
        return Place(self._phase, self._layer, "", f"fsdp::{operator}")
