"""The simulated allocator: sequences by hand, a second implementation, invariants, settings, whole streams."""

import pytest
import torch
from hypothesis import given, strategies as st
from tests.memory.reference_allocator import OutOfMemory, ReferenceAllocator
from tests.properties import examples

from brim.errors import InputError
from brim.memory.allocator import AllocatorSettings, CachingAllocator, Heap, SimulatedOutOfMemory, replay
from brim.memory.events import EventStream, Place

KIB, MIB, GIB = 2**10, 2**20, 2**30
HERE = Place("forward")
parse = AllocatorSettings.parse
EXPANDABLE = "expandable_segments:True"
FRACTION = "per_process_memory_fraction:0.5"


def figures(allocator):
    return allocator.allocated_bytes, allocator.reserved_bytes


class Hand:
    """Requests in MiB one after another: n asks for n, -n frees the n-th request, "empty" empties the cache.

    (n, k): n MiB are asked for, and must come to lie where the k-th request lay.
    """

    def __init__(self, settings="", capacity=None):
        self.allocator = CachingAllocator(parse(settings), capacity_bytes=capacity and capacity * MIB)
        self.handles = []

    def __call__(self, *moves):
        for move in moves:
            if move == "empty":
                self.allocator.empty_cache()
            elif isinstance(move, tuple):
                handle = self.allocator.malloc(int(move[0] * MIB))
                assert handle == self.handles[move[1] - 1], move
                self.handles.append(handle)
            elif move < 0:
                self.allocator.free(self.handles[-move - 1])
            else:
                self.handles.append(self.allocator.malloc(int(move * MIB)))
        return tuple(figure / MIB for figure in figures(self.allocator))


K = 512 / MIB  # the unit of blocks
BY_HAND = {  # settings, capacity; then moves and what is allocated and reserved after them, in MiB
    "a small request is rounded to 512 bytes and reserves 2 MiB": ("", None, [([1 / MIB], (K, 2)), ([513 / MIB], (3 * K, 2))]),
    "a small remainder of 512 bytes is split off": ("", None, [([1, 1 - K], (2 - K, 2)), ([K], (2, 2)), ([-1, -2], (K, 2))]),
    "below 10 MiB 20 are reserved": ("", None, [([10 - K], (10 - K, 20))]),
    "from 10 MiB on the next 2 MiB": ("", None, [([10], (10, 10)), ([10 + K], (20 + K, 22))]),
    "1 MiB that is left over stays with the block, more is split off": ("", None, [([11], (12, 12)), ([11 - K], (23 - K, 24))]),
    "the smallest block that fits is taken": ("", None, [([40, 30, -1, -2, (25, 2)], (25, 70)), ([(38, 1)], (63, 70))]),
    "of equal blocks the lower address": ("", None, [([30, 30, 30, -3, -2, -1, (30, 1), (30, 2), (30, 3)], (90, 90))]),
    "neighbours join when freed": ("", None, [([6, 6, 6, -1, -3, (8, 3)], (14, 20)), ([-2, (12, 1)], (20, 20))]),
    "segments that lie side by side do not join": ("", None, [([20, 20, -1, -2, 40], (40, 80))]),
    "fragments cannot serve a request of their sum": ("", None, [([6] * 6 + [-1, -3, -5], (18, 40)), ([13], (32, 54))]),
    "whole free segments alone are given back": ("", None, [([6, 64, -2, K, -3], (6, 86)), (["empty"], (6, 20))]),
    "cached segments go before memory runs out": ("", 100, [([60, -1, 80], (80, 80))]),
    "a block of the split limit stays whole": ("max_split_size_mb:40", None, [([60, -1, 30], (30, 90)), ([(50, 1)], (90, 90))]),
    "an oversize block serves what is within 20 MiB of it": ("max_split_size_mb:40", None, [([60, -1, 40], (40, 100))]),
    "just enough oversize blocks are given back": ("max_split_size_mb:40", 200, [([50, 60, 70, -1, -2, -3, 100], (100, 150))]),
    # Allowed 200 MiB, threshold 100. With 140 reserved, 80 more free 40: the block that waited longer.
    "garbage is collected oldest first": (
        f"garbage_collection_threshold:0.5,{FRACTION}", 400, [([40, 40, 60, -1, -2, 40, -4, 80], (140, 180)), ([(40, 1)], (180, 180))]
    ),
    "collection needs a fraction, as in PyTorch": ("garbage_collection_threshold:0.1", 200, [([50, -1, 80], (80, 130))]),
    "an expandable segment grows by pages of 20 MiB": (EXPANDABLE, None, [([25], (25, 40)), ([25], (50, 60)), ([K], (50 + K, 62))]),
    "a hole in the middle is preferred to the end that can grow": (
        EXPANDABLE, None, [([20, 20, 20, -1, -3, (20, 1), (20, 3), -2], (40, 60))]
    ),
    # Pages 0 and 1 are free, page 2 is shared with the second block.
    "whole free pages go back and are mapped again": (
        EXPANDABLE, None, [([50, 25], (75, 80)), ([-1, "empty"], (25, 40)), ([45], (70, 80)), ([-2, "empty"], (45, 60))]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "capacity", "stages"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(settings, capacity, stages):
    hand = Hand(settings, capacity)
    for moves, expected in stages:
        assert hand(*moves) == expected
    assert hand.allocator.num_retries == (capacity == 100)  # where the whole cache was given back
    assert capacity != 100 or hand.allocator.peak_reserved_bytes == 80 * MIB


def test_memory_runs_out_when_nothing_can_be_given_back_or_at_a_fraction_of_the_device():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(60 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(41 * MIB)
    message = "out of memory: 42.0 MiB requested, 60.0 MiB allocated, 60.0 MiB reserved, 100.0 MiB allowed"
    assert str(caught.value) == message
    assert allocator.malloc(40 * MIB)
    # A fraction of the device is a limit, too.
    allocator = CachingAllocator(parse(FRACTION), capacity_bytes=90 * MIB, device_bytes=100 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match=r"50\.0 MiB allowed"):
        allocator.malloc(12 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 50 * MIB


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
NAMES = {
    "expandable": ("expandable_segments", lambda value: value),
    "large": ("large_segment_size_mb", lambda value: value // MIB),
    "max_split": ("max_split_size_mb", lambda value: value // MIB),
    "slack": ("max_non_split_rounding_mb", lambda value: value // MIB),
    "threshold": ("garbage_collection_threshold", lambda value: value),
    "fraction": ("per_process_memory_fraction", lambda value: value),
    "roundup": ("roundup_power2_divisions", lambda value: value),
}


def settings_of(configuration):
    given = [(*NAMES[key], value) for key, value in configuration.items() if key in NAMES]
    return parse(",".join(f"{name}:{written(value)}" for name, written, value in given))


def attempt(allocator, size, stream):
    try:
        return allocator.malloc(size, stream)
    except (SimulatedOutOfMemory, OutOfMemory):
        return None


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
    allocator = CachingAllocator(parse(EXPANDABLE) if expandable else None)
    reserved = []
    for _ in range(3):
        for handle in [allocator.malloc(size) for size in step]:
            allocator.free(handle)
        reserved.append(allocator.reserved_bytes)
    assert figures(allocator) == (0, reserved[1])


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
    births = [("weights", 19 * MIB), ("activations", 6 * MIB), ("temporary", 100), ("gradients", 6 * MIB)]
    result = replay(stream_of(*births[:3], 2, births[3], 1, 3), CachingAllocator())
    block = 20 * MIB  # the weights' segment is not split for 19 MiB
    assert result.block_bytes.tolist() == [block, 6 * MIB, 512, 6 * MIB]
    assert result.live_bytes["weights"].tolist() == [block] * 7
    assert result.live_bytes["activations"].tolist() == [0, *[6 * MIB] * 4, 0, 0]
    assert result.live_bytes["temporary"].tolist() == [0, 0, 512, 0, 0, 0, 0]
    assert result.live_bytes["gradients"].tolist() == [0, 0, 0, 0, 6 * MIB, 6 * MIB, 0]
    assert result.reserved_bytes.tolist() == [20 * MIB, 40 * MIB, *[42 * MIB] * 5]
    beside = [0, 6 * MIB, 6 * MIB + 512, 6 * MIB, 12 * MIB, 6 * MIB, 0]
    assert result.allocated_bytes.tolist() == [block + each for each in beside]
    assert result.allocated_peak == 4


def test_storages_on_another_stream_take_memory_of_their_own_and_empty_ones_none():
    stream = stream_of(("temporary", 64 * MIB), 0, ("temporary", 64 * MIB))
    assert replay(stream, CachingAllocator()).reserved_bytes[-1] == 64 * MIB
    assert replay(stream, CachingAllocator(), cuda_streams=[0, 1]).reserved_bytes[-1] == 128 * MIB
    result = replay(stream_of(("temporary", 0), 0, ("temporary", 0)), CachingAllocator())
    assert result.allocated_bytes.tolist() == result.reserved_bytes.tolist() == [0, 0, 0]
    result = replay(EventStream(), CachingAllocator())
    assert result.allocated_bytes.shape == result.live_bytes["weights"].shape == (0,)


def test_what_a_stream_leaves_alive_stays_in_the_allocator_and_a_lack_of_memory_names_the_event():
    allocator = CachingAllocator()
    replay(stream_of(("workspace", 8_519_680)), allocator)
    assert replay(stream_of(("weights", 30 * MIB)), allocator).allocated_bytes.tolist() == [30 * MIB]
    assert allocator.allocated_bytes == 30 * MIB + 8_519_680
    stream = stream_of(("weights", 30 * MIB), ("temporary", 10 * MIB), 1, ("activations", 80 * MIB))
    with pytest.raises(SimulatedOutOfMemory) as caught:
        replay(stream, CachingAllocator(capacity_bytes=100 * MIB))
    assert caught.value.event == 3


def test_on_a_cpu_what_is_freed_is_gone_and_nothing_is_rounded():
    replayed = replay(stream_of(("weights", 1), ("temporary", 1_000_001), 0, 1), Heap())
    assert replayed.allocated_bytes.tolist() == replayed.reserved_bytes.tolist() == [1, 1_000_002, 1_000_001, 0]
    assert replayed.live_bytes["weights"].tolist() == [1, 1, 0, 0]


def test_every_setting_is_read():
    assert parse("") == AllocatorSettings() == AllocatorSettings.from_environment({})
    settings = parse(
        "backend:native, expandable_segments:True, large_segment_size_mb:32,max_split_size_mb:512,"
        "max_non_split_rounding_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.75,"
        "per_process_memory_fraction:0.5,pinned_use_background_threads:True"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=512 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        roundup_power2_divisions=(8,) * 16,
        garbage_collection_threshold=0.75,
        per_process_memory_fraction=0.5,
    )
    assert parse("large_segment_size_mb:48").max_non_split_rounding_bytes == 48 * MIB  # unless it is set


def test_the_older_variable_wins_as_it_does_in_pytorch():
    new = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:100"}
    assert AllocatorSettings.from_environment(new).max_split_bytes == 100 * MIB
    both = {**new, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:200"}
    assert AllocatorSettings.from_environment(both).max_split_bytes == 200 * MIB
    with pytest.raises(InputError, match="PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb is 'x'"):
        AllocatorSettings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:x"})


def test_divisions_by_interval():
    """The first is the list of c10/test/core/AllocatorConfig_test.cpp."""
    for text, by_mebibytes in (
        (
            "[64:8,128:2,256:4,512:2,1024:4,>:1]",
            {1: 8, 64: 8, 128: 2, 255: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 2**17: 1},
        ),
        ("[16:4,64:2]", {1: 4, 16: 4, 32: 0, 64: 2, 128: 0}),
        ("[>:4]", {1: 0, 2: 4, 64: 4}),
    ):
        divisions = parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions
        assert {size: divisions[min(size.bit_length() - 1, 15)] for size in by_mebibytes} == by_mebibytes


def test_sizes_are_rounded_as_in_pytorchs_own_test():
    four = parse("roundup_power2_divisions:4")
    assert four.rounded_bytes(84 * MIB) == 96 * MIB
    by_list = parse("garbage_collection_threshold:0.5,roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]")
    assert [by_list.rounded_bytes(size) for size in (84 * MIB, 400 * MIB)] == [88 * MIB, 512 * MIB]
    assert [four.rounded_bytes(size) for size in (600, 2048, 2049, 2561)] == [1024, 2048, 2560, 3072]  # small ones
    given = (1, 511, 512, 513, MIB + 1, 3 * GIB)
    assert [AllocatorSettings().rounded_bytes(size) for size in given] == [512, 512, 512, 1024, MIB + 512, 3 * GIB]


REFUSED_BY_BOTH = [
    "max_split_size_mb:10", "max_split_size_mb:abc", "max_split_size_mb", "max_split_size_mb:20,large_segment_size_mb:64",
    "max_non_split_rounding_mb:19", "large_segment_size_mb:10", "expandable_segments:true", "expandable_segments=True",
    "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "roundup_power2_divisions:3",
    "roundup_power2_divisions:0", "roundup_power2_divisions:[100:2]", "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[256:1,512:2,>:4", "max_split_size_mb:100;expandable_segments:True",
]  # fmt: skip
ACCEPTED_BY_BOTH = [
    "", " expandable_segments : True ", "expandable_segments:False,", "max_split_size_mb:20", "max_split_size_mb:1000000",
    "large_segment_size_mb:11", "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "large_segment_size_mb:15,max_split_size_mb:20,max_non_split_rounding_mb:40,garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[64:0]", "roundup_power2_divisions:1", "pinned_max_cached_size_mb:4",
]  # fmt: skip


def problems(text):
    with pytest.raises(InputError) as caught:
        parse(text)
    return caught.value.problems


@pytest.fixture
def set_in_torch():
    before = torch._C._accelerator_getAllocatorSettings()
    # The segment's size stays from one call to the next, unlike the other settings.
    yield lambda text: torch._C._accelerator_setAllocatorSettings(text)
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("text", [*REFUSED_BY_BOTH, *ACCEPTED_BY_BOTH])
def test_what_pytorch_refuses_is_refused_and_what_it_accepts_accepted(text, set_in_torch):
    if text in ACCEPTED_BY_BOTH:
        set_in_torch(text)
        parse(text)
        return
    with pytest.raises((ValueError, RuntimeError)):
        set_in_torch(text)
    assert problems(text)


def test_a_mistake_says_what_and_how_to_mend_it():
    for text, what, fix in (
        ("max_split_size:128", "unknown allocator setting 'max_split_size'", "write max_split_size_mb:<value>"),
        ("expandable_segments=True", "unknown allocator setting 'expandable_segments=True'", "write expandable_segments:<value>"),
        ("zzz:1", "unknown allocator setting 'zzz'", "remove it; settings are written key:value, separated by commas"),
        ("expandable_segments:true", "expandable_segments is 'true'", "write expandable_segments:True"),
        ("max_split_size_mb:512mb", "max_split_size_mb is '512mb'", "write max_split_size_mb:512"),
        ("max_split_size_mb:10", "max_split_size_mb is 10", "write max_split_size_mb:20"),
        ("large_segment_size_mb:10", "large_segment_size_mb is 10", "write large_segment_size_mb:20, the default"),
        ("garbage_collection_threshold:80", "garbage_collection_threshold is '80'", "write garbage_collection_threshold:0.8"),
        ("roundup_power2_divisions:[64:3]", "roundup_power2_divisions has the entry '64:3'", "write roundup_power2_divisions:4"),
        ("backend:cudamallocasync", "backend is 'cudamallocasync'", "remove it; native is the default"),
    ):  # fmt: skip
        (problem,) = problems(text)
        assert (problem.what, problem.where, problem.fix) == (what, "PYTORCH_ALLOC_CONF", fix)
        assert problem.expected
    (problem,) = problems("backend:cudaMallocAsync")
    assert problem.what.startswith("backend:cudaMallocAsync cannot be simulated: CUDA's driver, not PyTorch, decides")
    found = problems("max_split_size_mb:1,foo:1,expandable_segments:yes")  # all at once
    assert [each.what.split()[-1] for each in found] == ["'foo'", "'yes'", "1"]
