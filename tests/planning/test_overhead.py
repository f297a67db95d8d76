"""What the caching allocator needs beyond what is allocated."""

import pytest
from tests.planning.planned import shapes_of

from brim.memory.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory, replay
from brim.memory.trace import EventStream, Place
from brim.planning.costs import overhead_bytes
from brim.planning.costs.traces import least_capacity, most_demanding

MIB = 2**20
HERE = Place("forward")


def stream_of(*sizes_mib):
    """Births of blocks; a negative number is the death of the block of that size."""
    stream, alive = EventStream(), {}
    for size in sizes_mib:
        if size > 0:
            alive[size] = stream.birth(size * MIB, "activations", HERE)
        else:
            stream.death(alive.pop(-size), HERE)
    return stream


def test_blocks_that_fit_into_those_that_were_freed_need_nothing_more():
    stream = stream_of(100, -100, 60, 40, -60, -40)
    assert least_capacity(stream, AllocatorSettings(), peak_bytes=100 * MIB) == 100 * MIB


def test_whole_blocks_are_given_back_and_need_nothing_more():
    """Left alone, 60 + 80 + 100 MiB would be reserved."""
    stream = stream_of(60, -60, 80, -80, 100, -100)
    assert least_capacity(stream, AllocatorSettings(), peak_bytes=100 * MIB) == 101 * MIB


def test_a_split_block_that_still_holds_something_is_needed_twice():
    """30 of the 100 MiB live on, so the rest of that segment cannot be given back for a block of 100."""
    stream = stream_of(100, -100, 30, 70, -70, 100, -100)
    enough = least_capacity(stream, AllocatorSettings(), peak_bytes=130 * MIB)
    assert enough == 200 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        replay(stream, CachingAllocator(capacity_bytes=198 * MIB))


def test_expandable_segments_need_whole_pages_and_no_more():
    stream = stream_of(100, -100, 30, 70, -70, 100, -100)
    settings = AllocatorSettings(expandable_segments=True)
    assert least_capacity(stream, settings, peak_bytes=130 * MIB) == 7 * 20 * MIB


def test_shapes_that_are_about_alike_are_simulated_once():
    used = [(1, 700), (9, 243), (9, 244), (2, 700), (30, 64), (20, 30), (3, 100)]
    assert most_demanding(used) == [(3, 700), (1, 700), (9, 256), (32, 64)]  # of 1,400, 700, 2,196 and 1,920 tokens
    assert most_demanding([(1, 130), (1, 129)]) == [(1, 130)]


def test_a_cpu_needs_nothing_beyond_what_lives(tmp_path):
    shapes = shapes_of(tmp_path)
    assert overhead_bytes(shapes, [(4, 100)]) == 0
    assert shapes.num_traced == 0


def test_a_gpu_gets_through_with_what_is_said_and_it_is_kept(tmp_path):
    given = {"device": "t4", "cache_folder": tmp_path / "cache", "chunked_loss": False}
    shapes = shapes_of(tmp_path, **given)
    found = overhead_bytes(shapes, [(2, 500), (7, 120)])
    assert 0 < found <= 0.35 * shapes.peak_bytes(2, 500)
    again = shapes_of(tmp_path, **given)
    assert overhead_bytes(again, [(2, 500), (7, 120)]) == found
    assert again.num_traced == 0
