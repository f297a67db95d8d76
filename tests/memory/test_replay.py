"""Streams of births and deaths, run through the simulated allocator."""

import numpy as np
import pytest

from brim.memory.allocator import CachingAllocator, SimulatedOutOfMemory, replay
from brim.memory.trace import CATEGORIES, EventStream, Place

MIB = 2**20
HERE = Place("forward")


def stream_of(*steps):
    """("weights", bytes) is a birth, an integer the death of that storage."""
    stream = EventStream()
    for step in steps:
        if isinstance(step, int):
            stream.death(step, HERE)
        else:
            stream.birth(step[1], step[0], HERE)
    return stream


def test_a_stream_by_hand():
    stream = stream_of(
        ("weights", 19 * MIB), ("activations", 6 * MIB), ("temporary", 100), 2, ("gradients", 6 * MIB), 1, 3
    )  # fmt: skip
    result = replay(stream, CachingAllocator())
    block = 20 * MIB  # the weights' segment is not split for 19 MiB
    assert result.block_bytes.tolist() == [block, 6 * MIB, 512, 6 * MIB]
    assert result.live_bytes["weights"].tolist() == [block] * 7
    assert result.live_bytes["activations"].tolist() == [0, *[6 * MIB] * 4, 0, 0]
    assert result.live_bytes["temporary"].tolist() == [0, 0, 512, 0, 0, 0, 0]
    assert result.live_bytes["gradients"].tolist() == [0, 0, 0, 0, 6 * MIB, 6 * MIB, 0]
    assert result.reserved_bytes.tolist() == [20 * MIB, 40 * MIB, *[42 * MIB] * 5]
    assert result.allocated_bytes.tolist() == [
        block, block + 6 * MIB, block + 6 * MIB + 512, block + 6 * MIB, block + 12 * MIB, block + 6 * MIB, block
    ]  # fmt: skip
    assert result.allocated_peak == 4


def test_categories_sum_to_what_the_allocator_counts():
    generator = np.random.default_rng(0)
    stream, alive, allocator = EventStream(), [], CachingAllocator()
    for _ in range(2000):
        if alive and generator.random() < 0.48:
            stream.death(alive.pop(int(generator.integers(len(alive)))), HERE)
        else:
            size = int(2 ** generator.uniform(0, 26))
            alive.append(stream.birth(size, CATEGORIES[int(generator.integers(len(CATEGORIES)))], HERE))
    result = replay(stream, allocator)
    total = np.sum([result.live_bytes[category] for category in CATEGORIES], axis=0)
    assert (total == result.allocated_bytes).all()
    assert result.allocated_bytes[-1] == allocator.allocated_bytes
    assert result.allocated_bytes.max() == allocator.peak_allocated_bytes
    assert result.allocated_bytes[result.allocated_peak] == allocator.peak_allocated_bytes
    assert result.reserved_bytes.max() == allocator.peak_reserved_bytes
    assert (result.reserved_bytes >= result.allocated_bytes).all()


def test_empty_storages_take_nothing():
    result = replay(stream_of(("temporary", 0), 0, ("temporary", 0)), CachingAllocator())
    assert result.allocated_bytes.tolist() == result.reserved_bytes.tolist() == [0, 0, 0]


def test_an_empty_stream():
    result = replay(EventStream(), CachingAllocator())
    assert result.allocated_bytes.shape == result.live_bytes["weights"].shape == (0,)


def test_storages_on_another_stream_take_memory_of_their_own():
    stream = stream_of(("temporary", 64 * MIB), 0, ("temporary", 64 * MIB))
    assert replay(stream, CachingAllocator()).reserved_bytes[-1] == 64 * MIB
    assert replay(stream, CachingAllocator(), cuda_streams=[0, 1]).reserved_bytes[-1] == 128 * MIB


def test_what_a_stream_leaves_alive_stays_in_the_allocator():
    allocator = CachingAllocator()
    replay(stream_of(("workspace", 8_519_680)), allocator)
    result = replay(stream_of(("weights", 30 * MIB)), allocator)
    assert result.allocated_bytes.tolist() == [30 * MIB]
    assert allocator.allocated_bytes == 30 * MIB + 8_519_680


def test_a_lack_of_memory_names_the_event():
    stream = stream_of(("weights", 30 * MIB), ("temporary", 10 * MIB), 1, ("activations", 80 * MIB))
    with pytest.raises(SimulatedOutOfMemory) as caught:
        replay(stream, CachingAllocator(capacity_bytes=100 * MIB))
    assert caught.value.event == 3
    assert stream.places[caught.value.event] == HERE
