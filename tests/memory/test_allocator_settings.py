"""PYTORCH_ALLOC_CONF, compared with the parser of the installed PyTorch."""

import pytest
import torch

from brim.errors import InputError
from brim.memory.allocator import AllocatorSettings

MIB, GIB = 2**20, 2**30
parse = AllocatorSettings.parse


def problems(text):
    with pytest.raises(InputError) as caught:
        parse(text)
    return caught.value.problems


def test_no_settings_are_the_defaults():
    assert parse("") == AllocatorSettings()
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


def test_every_setting_is_read():
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
        ignored=("pinned_use_background_threads: it concerns the host's memory",),
    )


def test_the_rounding_limit_follows_the_segment_unless_it_is_set():
    assert parse("large_segment_size_mb:48").max_non_split_rounding_bytes == 48 * MIB


def test_the_older_variable_wins_as_it_does_in_pytorch():
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:100", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:200"}
    assert AllocatorSettings.from_environment(both).max_split_bytes == 200 * MIB
    new = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:100"}
    assert AllocatorSettings.from_environment(new).max_split_bytes == 100 * MIB


def test_a_mistake_names_the_variable_that_has_it():
    with pytest.raises(InputError, match="PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb is 'x'"):
        AllocatorSettings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:x"})


# c10/test/core/AllocatorConfig_test.cpp and test/test_cuda.py (test_allocator_settings) of PyTorch use these lists.
@pytest.mark.parametrize(
    ("text", "by_mebibytes"),
    [
        (
            "[64:8,128:2,256:4,512:2,1024:4,>:1]",
            {1: 8, 32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 8192: 1, 2**17: 1},
        ),
        ("[256:1,512:2,>:4]", {1: 1, 255: 1, 256: 1, 511: 1, 512: 2, 1023: 2, 1024: 4, 65536: 4}),
        ("[16:4,64:2]", {1: 4, 16: 4, 32: 0, 64: 2, 128: 0}),
        ("[>:4]", {1: 0, 2: 4, 64: 4}),
        ("4", {1: 4, 64: 4, 65536: 4}),
    ],
)
def test_divisions_by_interval(text, by_mebibytes):
    divisions = parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions
    assert {size: divisions[min(size.bit_length() - 1, 15)] for size in by_mebibytes} == by_mebibytes


def power2_div(size, divisions):
    """The oracle of PyTorch's test_cuda.py: the next of equal steps between two powers of two."""
    power = 1
    while power < size:
        power *= 2
    if power == size:
        return power
    step, rounded = power // 2 // divisions, power // 2
    while rounded < size:
        rounded += step
    return rounded


def test_sizes_are_rounded_as_in_pytorchs_own_test():
    num_bytes, num_bytes_big = 4 * 21 * MIB, 4 * 100 * MIB
    assert parse("roundup_power2_divisions:4").rounded_bytes(num_bytes) == power2_div(num_bytes, 4) == 96 * MIB
    by_list = parse("garbage_collection_threshold:0.5,roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]")
    assert by_list.rounded_bytes(num_bytes) == power2_div(num_bytes, 8) == 88 * MIB
    assert by_list.rounded_bytes(num_bytes_big) == power2_div(num_bytes_big, 2) == 512 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512), (3 * GIB, 3 * GIB)]
)
def test_without_divisions_sizes_are_multiples_of_512(num_bytes, rounded):
    assert AllocatorSettings().rounded_bytes(num_bytes) == rounded


def test_small_sizes_are_not_divided():
    settings = parse("roundup_power2_divisions:4")
    assert [settings.rounded_bytes(size) for size in (600, 2048, 2049, 2561)] == [1024, 2048, 2560, 3072]


REFUSED_BY_BOTH = [
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_split_size_mb:20,large_segment_size_mb:64",
    "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10",
    "expandable_segments:true",
    "expandable_segments=True",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[100:2]",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[256:1,512:2,>:4",
    "max_split_size_mb:100;expandable_segments:True",
]
ACCEPTED_BY_BOTH = [
    "",
    " expandable_segments : True ",
    "expandable_segments:False,",
    "max_split_size_mb:20",
    "max_split_size_mb:1000000",
    "large_segment_size_mb:11",
    "large_segment_size_mb:15,max_split_size_mb:20,max_non_split_rounding_mb:40,garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[64:0]",
    "roundup_power2_divisions:1",
    "pinned_max_cached_size_mb:4",
]


@pytest.fixture
def set_in_torch():
    before = torch._C._accelerator_getAllocatorSettings()
    # The segment's size stays from one call to the next, unlike the other settings.
    yield lambda text: torch._C._accelerator_setAllocatorSettings(text)
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("text", REFUSED_BY_BOTH)
def test_what_pytorch_refuses_is_refused(text, set_in_torch):
    with pytest.raises((ValueError, RuntimeError)):
        set_in_torch(text)
    assert problems(text)


@pytest.mark.parametrize("text", ACCEPTED_BY_BOTH)
def test_what_pytorch_accepts_is_accepted(text, set_in_torch):
    set_in_torch(text)
    parse(text)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("max_split_size:128", "unknown allocator setting 'max_split_size'", "write max_split_size_mb:<value>"),
        ("expandable_segment:True", "unknown allocator setting 'expandable_segment'", "write expandable_segments:<value>"),
        ("expandable_segments=True", "unknown allocator setting 'expandable_segments=True'", "write expandable_segments:<value>"),
        ("zzz:1", "unknown allocator setting 'zzz'", "remove it; settings are written key:value, separated by commas"),
        ("expandable_segments:true", "expandable_segments is 'true'", "write expandable_segments:True"),
        ("max_split_size_mb:512mb", "max_split_size_mb is '512mb'", "write max_split_size_mb:512"),
        ("max_split_size_mb:-5", "max_split_size_mb is '-5'", "write max_split_size_mb:512"),
        ("max_split_size_mb:10", "max_split_size_mb is 10", "write max_split_size_mb:20"),
        ("large_segment_size_mb:10", "large_segment_size_mb is 10", "write large_segment_size_mb:20, the default"),
        ("garbage_collection_threshold:80", "garbage_collection_threshold is '80'", "write garbage_collection_threshold:0.8"),
        ("roundup_power2_divisions:[64:3]", "roundup_power2_divisions has the entry '64:3'", "write roundup_power2_divisions:4"),
        ("backend:cudamallocasync", "backend is 'cudamallocasync'", "remove it; native is the default"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_and_how_to_mend_it(text, what, fix):
    (problem,) = problems(text)
    assert (problem.what, problem.where, problem.fix) == (what, "PYTORCH_ALLOC_CONF", fix)
    assert problem.expected


def test_every_mistake_is_told_at_once():
    found = problems("max_split_size_mb:1,foo:1,expandable_segments:yes")
    assert [problem.what for problem in found] == [
        "unknown allocator setting 'foo'",
        "expandable_segments is 'yes'",
        "max_split_size_mb is 1",
    ]


def test_the_drivers_own_allocator_cannot_be_simulated():
    (problem,) = problems("backend:cudaMallocAsync")
    assert problem.what == (
        "backend:cudaMallocAsync cannot be simulated: CUDA's driver, not PyTorch, decides what is reserved"
    )
