"""The simulated caching allocator: sequences worked out by hand, a second implementation, invariants."""

import pytest
from hypothesis import given, strategies as st
from tests.memory.reference_allocator import OutOfMemory, ReferenceAllocator
from tests.properties import examples

from brim.memory.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30
parse = AllocatorSettings.parse


def figures(allocator):
    return allocator.allocated_bytes, allocator.reserved_bytes


# By hand: small blocks


def test_a_small_request_is_rounded_to_512_and_reserves_2_mib():
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    assert figures(allocator) == (512, 2 * MIB)
    assert allocator.block_bytes(handle) == 512
    allocator.malloc(513)
    assert figures(allocator) == (512 + 1024, 2 * MIB)


def test_two_mebibytes_hold_two_small_requests_of_one_and_a_third_opens_a_segment():
    allocator = CachingAllocator()
    for expected in (2, 2, 4):
        allocator.malloc(MIB)
        assert allocator.reserved_bytes == expected * MIB
    assert allocator.allocated_bytes == 3 * MIB


def test_no_bytes_take_nothing():
    allocator = CachingAllocator()
    handle = allocator.malloc(0)
    assert (handle, allocator.block_bytes(handle), *figures(allocator)) == (0, 0, 0, 0)
    allocator.free(handle)


def test_a_small_remainder_of_512_is_split_off():
    allocator = CachingAllocator()
    first = allocator.malloc(MIB)
    second = allocator.malloc(MIB - 512)
    assert allocator.allocated_bytes == 2 * MIB - 512
    allocator.malloc(512)
    assert figures(allocator) == (2 * MIB, 2 * MIB)
    allocator.free(first)
    allocator.free(second)


# By hand: large blocks


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded to 10 MiB first
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 12 * MIB),  # 2 MiB - 512 left over: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB left over: not more than 1 MiB, so the block keeps it
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (GIB + 1, GIB + 512, GIB + 2 * MIB),
    ],
)
def test_a_large_request_and_its_segment(request_bytes, block_bytes, segment_bytes):
    allocator = CachingAllocator()
    handle = allocator.malloc(request_bytes)
    if request_bytes == 10 * MIB + 1:
        block_bytes = 10 * MIB + 512
    assert allocator.block_bytes(handle) == allocator.allocated_bytes == block_bytes
    assert allocator.reserved_bytes == segment_bytes


def test_a_block_that_is_not_split_counts_whole():
    """19.5 MiB in a segment of 20 MiB: memory_allocated says 20 MiB."""
    allocator = CachingAllocator()
    allocator.malloc(39 * MIB // 2)
    assert allocator.allocated_bytes == 20 * MIB


def test_twenty_mebibytes_serve_several_requests():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.malloc(6 * MIB)
    assert figures(allocator) == (18 * MIB, 20 * MIB)
    allocator.malloc(2 * MIB)
    assert figures(allocator) == (20 * MIB, 20 * MIB)
    allocator.malloc(2 * MIB)
    assert figures(allocator) == (22 * MIB, 40 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    wide, narrow = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.malloc(25 * MIB) == narrow
    assert figures(allocator) == (25 * MIB, 70 * MIB)
    assert allocator.malloc(38 * MIB) == wide
    assert figures(allocator) == (63 * MIB, 70 * MIB)


def test_of_equal_blocks_the_lower_address_is_taken():
    allocator = CachingAllocator()
    handles = [allocator.malloc(30 * MIB) for _ in range(3)]
    for handle in reversed(handles):
        allocator.free(handle)
    assert [allocator.malloc(30 * MIB) for _ in range(3)] == sorted(handles)


def test_neighbours_join_when_freed():
    allocator = CachingAllocator()
    a, b, c = (allocator.malloc(6 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)  # joins the last 2 MiB: 8 MiB
    assert allocator.malloc(8 * MIB) == c
    assert figures(allocator) == (14 * MIB, 20 * MIB)
    allocator.free(b)  # joins a: 12 MiB
    assert allocator.malloc(12 * MIB) == a
    assert figures(allocator) == (20 * MIB, 20 * MIB)


def test_segments_that_lie_side_by_side_do_not_join():
    allocator = CachingAllocator()
    handles = [allocator.malloc(20 * MIB) for _ in range(2)]
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_fragments_cannot_serve_a_request_of_their_sum():
    """Live blocks between free ones: 18 MiB are free, and 13 MiB more must be reserved."""
    allocator = CachingAllocator()
    handles = [allocator.malloc(6 * MIB) for _ in range(6)]  # 3 in each of two segments of 20 MiB
    for handle in handles[::2]:
        allocator.free(handle)
    assert figures(allocator) == (18 * MIB, 40 * MIB)
    allocator.malloc(13 * MIB)
    assert figures(allocator) == (18 * MIB + 14 * MIB, 40 * MIB + 14 * MIB)


# By hand: figures, streams, the cache


def test_peaks_stay_until_they_are_reset():
    allocator = CachingAllocator()
    handle = allocator.malloc(100 * MIB)
    allocator.free(handle)
    allocator.malloc(10 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (100 * MIB, 100 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (10 * MIB, 100 * MIB)


def test_empty_cache_gives_back_whole_free_segments_only():
    allocator = CachingAllocator()
    allocator.malloc(6 * MIB)
    allocator.free(allocator.malloc(64 * MIB))
    allocator.free(allocator.malloc(512))
    assert allocator.reserved_bytes == 86 * MIB
    allocator.empty_cache()
    assert figures(allocator) == (6 * MIB, 20 * MIB)


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(64 * MIB, stream=2)
    assert figures(allocator) == (64 * MIB, 128 * MIB)
    allocator.malloc(64 * MIB)
    assert figures(allocator) == (128 * MIB, 128 * MIB)


# By hand: a device with an end


def test_cached_segments_are_given_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert figures(allocator) == (80 * MIB, 80 * MIB)
    assert (allocator.num_retries, allocator.peak_reserved_bytes) == (1, 80 * MIB)


def test_memory_runs_out_when_nothing_can_be_given_back():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(60 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(41 * MIB)
    error = caught.value
    assert (error.requested_bytes, error.allocated_bytes, error.reserved_bytes) == (42 * MIB, 60 * MIB, 60 * MIB)
    assert error.allowed_bytes == 100 * MIB
    assert str(error) == "out of memory: 42.0 MiB requested, 60.0 MiB allocated, 60.0 MiB reserved, 100.0 MiB allowed"
    assert allocator.malloc(40 * MIB)


def test_fragments_keep_their_segments_when_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=60 * MIB)
    handles = [allocator.malloc(6 * MIB) for _ in range(6)]
    for handle in handles[1:3] + handles[4:]:
        allocator.free(handle)
    assert figures(allocator) == (12 * MIB, 40 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(22 * MIB)


def test_a_fraction_of_the_device_is_the_limit():
    allocator = CachingAllocator(
        parse("per_process_memory_fraction:0.5"), capacity_bytes=90 * MIB, device_bytes=100 * MIB
    )
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match=r"50\.0 MiB allowed"):
        allocator.malloc(12 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 50 * MIB


# By hand: settings


def test_a_block_of_the_split_limit_or_more_stays_whole():
    """max_split_size_mb:40: 60 MiB are not split for 30, but may serve 50 (10 MiB more, below 20)."""
    allocator = CachingAllocator(parse("max_split_size_mb:40"))
    handle = allocator.malloc(60 * MIB)
    allocator.free(handle)
    allocator.malloc(30 * MIB)
    assert figures(allocator) == (30 * MIB, 90 * MIB)
    assert allocator.malloc(50 * MIB) == handle
    assert figures(allocator) == (90 * MIB, 90 * MIB)


def test_an_oversize_block_serves_only_requests_within_20_mib():
    allocator = CachingAllocator(parse("max_split_size_mb:40"))
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(40 * MIB)  # 60 is not below 40 + 20
    assert figures(allocator) == (40 * MIB, 100 * MIB)


def test_just_enough_oversize_blocks_are_given_back():
    allocator = CachingAllocator(parse("max_split_size_mb:40"), capacity_bytes=200 * MIB)
    handles = [allocator.malloc(size * MIB) for size in (50, 60, 70)]
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(100 * MIB)  # 70, then 60: the largest first, until 100 are free
    assert figures(allocator) == (100 * MIB, 150 * MIB)
    assert allocator.num_retries == 0


def test_another_segment_size():
    allocator = CachingAllocator(parse("large_segment_size_mb:40"))
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_rounding_up_makes_blocks_alike():
    allocator = CachingAllocator(parse("roundup_power2_divisions:4"))
    allocator.free(allocator.malloc(84 * MIB))
    assert allocator.reserved_bytes == 96 * MIB
    allocator.malloc(90 * MIB)
    assert figures(allocator) == (96 * MIB, 96 * MIB)


def test_garbage_is_collected_above_the_threshold_oldest_first():
    """Allowed 200 MiB, threshold 100. With 140 reserved, a new segment frees 40: the block that waited longer."""
    settings = parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5")
    allocator = CachingAllocator(settings, capacity_bytes=400 * MIB)
    young, old, _ = (allocator.malloc(size * MIB) for size in (40, 40, 60))
    allocator.free(young)
    allocator.free(old)
    allocator.free(allocator.malloc(40 * MIB))  # the lower address, so that it is one request younger
    allocator.malloc(80 * MIB)
    assert allocator.reserved_bytes == (140 - 40 + 80) * MIB
    assert allocator.malloc(40 * MIB) == young
    assert allocator.num_retries == 0


def test_below_the_threshold_nothing_is_collected():
    settings = parse("garbage_collection_threshold:0.9,per_process_memory_fraction:0.5")
    allocator = CachingAllocator(settings, capacity_bytes=400 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.reserved_bytes == 130 * MIB


def test_collection_needs_a_fraction_as_in_pytorch():
    allocator = CachingAllocator(parse("garbage_collection_threshold:0.1"), capacity_bytes=200 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.reserved_bytes == 130 * MIB


# By hand: expandable segments

EXPANDABLE = parse("expandable_segments:True")


def test_an_expandable_segment_grows_by_pages_of_20_mib():
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(25 * MIB)
    assert figures(allocator) == (25 * MIB, 40 * MIB)
    allocator.malloc(25 * MIB)  # 15 MiB are left of the pages
    assert figures(allocator) == (50 * MIB, 60 * MIB)
    allocator.malloc(512)
    assert figures(allocator) == (50 * MIB + 512, 62 * MIB)


def test_an_expandable_block_is_split_to_512_bytes():
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(19 * MIB)
    assert figures(allocator) == (19 * MIB, 20 * MIB)


def test_what_was_freed_grows_into_what_is_larger():
    """Where segments of their own would reserve 60 + 70 MiB, the expandable one grows from 60 to 80."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert figures(allocator) == (70 * MIB, 80 * MIB)


def test_a_hole_in_the_middle_is_preferred_to_the_end_that_can_grow():
    allocator = CachingAllocator(EXPANDABLE)
    a, b, c = (allocator.malloc(20 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)  # a free block before the unmapped rest
    assert allocator.malloc(20 * MIB) == a
    assert allocator.malloc(20 * MIB) == c
    allocator.free(b)


def test_whole_free_pages_go_back_and_are_mapped_again():
    allocator = CachingAllocator(EXPANDABLE)
    a, b = allocator.malloc(50 * MIB), allocator.malloc(25 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(a)
    allocator.empty_cache()  # pages 0 and 1 are free, page 2 is shared with b
    assert figures(allocator) == (25 * MIB, 40 * MIB)
    allocator.malloc(45 * MIB)
    assert figures(allocator) == (70 * MIB, 80 * MIB)
    allocator.free(b)
    allocator.empty_cache()
    assert figures(allocator) == (45 * MIB, 60 * MIB)


def test_an_expandable_segment_runs_out_by_pages():
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=90 * MIB)
    allocator.malloc(65 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(16 * MIB)
    allocator.malloc(15 * MIB)
    assert figures(allocator) == (80 * MIB, 80 * MIB)


# Against the second implementation, and invariants

sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB + KIB),
    st.integers(MIB, 11 * MIB),
    st.integers(9 * MIB, 70 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 40 * MIB, 64 * MIB, 120 * MIB]),
)
moves = st.lists(st.tuples(st.integers(0, 20), sizes, st.sampled_from([0, 0, 0, 1, 3])), max_size=120)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "expandable": st.just(True),
        "large": st.sampled_from([12 * MIB, 24 * MIB]),
        "max_split": st.sampled_from([40 * MIB, 64 * MIB]),
        "slack": st.sampled_from([40 * MIB]),
        "threshold": st.sampled_from([0.3, 0.6]),
        "fraction": st.sampled_from([0.5, 0.8]),
        "capacity": st.sampled_from([160 * MIB, 301 * MIB]),
        "roundup": st.sampled_from(["4", "[4:2,16:4,>:8]"]),
    },
)


def settings_of(configuration):
    names = {
        "expandable": ("expandable_segments", lambda value: value),
        "large": ("large_segment_size_mb", lambda value: value // MIB),
        "max_split": ("max_split_size_mb", lambda value: value // MIB),
        "slack": ("max_non_split_rounding_mb", lambda value: value // MIB),
        "threshold": ("garbage_collection_threshold", lambda value: value),
        "fraction": ("per_process_memory_fraction", lambda value: value),
        "roundup": ("roundup_power2_divisions", lambda value: value),
    }
    return parse(
        ",".join(f"{names[key][0]}:{names[key][1](value)}" for key, value in configuration.items() if key in names)
    )


@examples(150)
@given(configurations, moves)
def test_a_second_implementation_gives_the_same_figures(configuration, moves):
    chosen = settings_of(configuration)
    arguments = {key: value for key, value in configuration.items() if key != "roundup"}
    arguments.setdefault("slack", arguments.get("large", 20 * MIB))
    if "capacity" not in arguments:
        arguments.pop("fraction", None)
    reference = ReferenceAllocator(round_size=chosen.rounded_bytes, **arguments)
    allocator = CachingAllocator(chosen, capacity_bytes=configuration.get("capacity"))
    live = []
    for choice, size, stream in moves:
        if choice == 0:
            allocator.empty_cache()
            reference.empty_cache()
        elif choice < 12 or not live:
            handle, block = attempt(allocator, size, stream), attempt(reference, size, stream)
            assert (handle is None) == (block is None)
            if handle is not None:
                assert allocator.block_bytes(handle) == block.size
                live.append((handle, block))
        else:
            handle, block = live.pop(choice % len(live))
            allocator.free(handle)
            reference.free(block)
        assert figures(allocator) == (reference.allocated, reference.reserved)
        assert allocator.peak_allocated_bytes == reference.peak_allocated
        assert allocator.peak_reserved_bytes == reference.peak_reserved
        assert allocator.num_retries == reference.retries


def attempt(allocator, size, stream):
    try:
        return allocator.malloc(size, stream)
    except (SimulatedOutOfMemory, OutOfMemory):
        return None


@given(configurations, moves)
def test_invariants(configuration, moves):
    capacity = configuration.get("capacity")
    chosen = settings_of(configuration)
    allocator = CachingAllocator(chosen, capacity_bytes=capacity)
    again = CachingAllocator(chosen, capacity_bytes=capacity)
    live = {}
    for choice, size, stream in moves:
        if choice < 12 or not live:
            handle = attempt(allocator, size, stream)
            assert attempt(again, size, stream) == handle  # the same requests, the same answers
            if handle is None:
                assert capacity is not None
                continue
            assert handle not in live
            live[handle] = allocator.block_bytes(handle)
            assert live[handle] >= size
        else:
            handle = sorted(live)[choice % len(live)]
            del live[handle]
            allocator.free(handle)
            again.free(handle)
        assert allocator.allocated_bytes == sum(live.values()) <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
        if capacity is not None:
            assert allocator.reserved_bytes <= capacity * configuration.get("fraction", 1) or chosen.expandable_segments
            assert allocator.reserved_bytes <= capacity
        end = 0
        for start in sorted(live):
            assert start >= end, "blocks overlap"
            end = start + live[start]
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0)


@examples(50)
@given(st.lists(sizes, max_size=60), st.booleans())
def test_a_step_that_repeats_reserves_nothing_new(step, expandable):
    """The same requests in the same order from a full cache: freed blocks are reused."""
    allocator = CachingAllocator(EXPANDABLE if expandable else None)
    for _ in range(2):
        for handle in [allocator.malloc(size) for size in step]:
            allocator.free(handle)
    reserved = allocator.reserved_bytes
    for handle in [allocator.malloc(size) for size in step]:
        allocator.free(handle)
    assert figures(allocator) == (0, reserved)
