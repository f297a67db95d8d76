"""A CPU's memory: no rounding, nothing kept."""

from brim.memory.allocator import Heap, replay
from brim.memory.trace import EventStream, Place

PLACE = Place("forward")


def test_what_is_freed_is_gone_and_nothing_is_rounded():
    stream = EventStream()
    first = stream.birth(1, "weights", PLACE)
    second = stream.birth(1_000_001, "temporary", PLACE)
    stream.death(first, PLACE)
    stream.death(second, PLACE)
    replayed = replay(stream, Heap())
    assert replayed.allocated_bytes.tolist() == [1, 1_000_002, 1_000_001, 0]
    assert replayed.reserved_bytes.tolist() == [1, 1_000_002, 1_000_001, 0]
    assert replayed.live_bytes["weights"].tolist() == [1, 1, 0, 0]
