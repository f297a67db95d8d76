"""Read the settings of PyTorch's caching allocator from PYTORCH_ALLOC_CONF.

They are read as PyTorch 2.10 to 2.13 read them (c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.cpp),
except that a mistake which PyTorch ignores silently (`100mb` for 100, a lone key at the end) is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from brim.config.text import nearest
from brim.errors import InputError, Problem

_MIB = 2**20


# The first of these that is set counts, as in c10/core/AllocatorConfig.cpp: the older name wins.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


NUM_INTERVALS = 16  # sizes from 1 MiB to 64 GiB, one interval for each power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Say how the caching allocator rounds, splits and gives back memory; the defaults are PyTorch's."""

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * _MIB  # what a request between 1 and 10 MiB takes from the device
    max_split_bytes: int | None = None  # a block of this size or larger is never split
    max_non_split_rounding_bytes: int = 20 * _MIB  # such a block serves requests that are at most this much smaller
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS  # for [1, 2) MiB, [2, 4) MiB, …; 0, 1: none
    garbage_collection_threshold: float = 0.0  # of the memory allowed by the fraction; 0: no collection
    per_process_memory_fraction: float = 1.0  # of the device's memory

    @classmethod
    def parse(cls, text: str, *, where: str = "PYTORCH_ALLOC_CONF") -> AllocatorSettings:
        """Read settings from text such as `key:value,key:[256:1,>:4]`. Raises InputError, with every mistake."""
        fields: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in _items(text):
            try:
                if key in _READERS:
                    field, reader = _READERS[key]
                    fields[field] = reader(key, value)
                elif key not in _WITHOUT_EFFECT:
                    raise _unknown(key)
            except _Mistake as mistake:
                problems.append(mistake.at(where))
        fields.pop("", None)
        fields.setdefault("max_non_split_rounding_bytes", fields.get("large_segment_bytes", 20 * _MIB))
        problems += [mistake.at(where) for mistake in _too_small(fields)]
        if problems:
            raise InputError(*problems)
        return cls(**fields)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """Read the settings from the variable that PyTorch would read. Raises InputError, naming it."""
        for variable in VARIABLES:
            if variable in environment:
                return cls.parse(environment[variable], where=variable)
        return cls()

    def rounded_bytes(self, num_bytes: int) -> int:
        """Return the block size that a request of `num_bytes` looks for (round_size in CUDACachingAllocator.cpp)."""
        if num_bytes < 512:
            return 512
        interval = min(max(num_bytes.bit_length() - 21, 0), NUM_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and num_bytes > 512 * divisions:
            step = (1 << (num_bytes.bit_length() - 1)) // divisions
            return -(-num_bytes // step) * step
        return -(-num_bytes // 512) * 512


class _Mistake(Exception):
    def __init__(self, what: str, expected: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.fix = what, expected, fix

    def at(self, where: str) -> Problem:
        return Problem(what=self.what, where=where, expected=self.expected, fix=self.fix)


def _items(text: str) -> list[tuple[str, str]]:
    """Split the text into (key, value) of each setting; commas in brackets separate nothing, spaces do not count."""
    items, depth, start = [], 0, 0
    text = "".join(text.split()) + ","
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and (depth <= 0 or position == len(text) - 1):
            key, _, value = text[start:position].partition(":")
            if key or value:
                items.append((key, value))
            start, depth = position + 1, 0
    return items


def _unknown(key: str) -> _Mistake:
    known = [*_READERS, *_WITHOUT_EFFECT]
    meant = nearest(key.partition("=")[0], known)
    return _Mistake(
        f"unknown allocator setting '{key}'",
        expected=f"one of {', '.join(known)}",
        fix=f"write {meant}:<value>" if meant else "remove it; settings are written key:value, separated by commas",
    )


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        fix = f"write {key}:{value.capitalize()}" if value.capitalize() in ("True", "False") else ""
        raise _Mistake(f"{key} is '{value}'", expected="True or False", fix=fix)
    return value == "True"


def _mebibytes(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise _Mistake(f"{key} is '{value}'", expected="a whole number of MiB, without a unit", fix=f"write {key}:512")
    return int(value) * _MIB


def _fraction(*, ends: bool) -> Callable[[str, str], float]:
    def read(key: str, value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not (0 <= number <= 1 if ends else 0 < number < 1):
            expected = "a number from 0 to 1" if ends else "a number above 0 and below 1"
            raise _Mistake(f"{key} is '{value}'", expected=expected, fix=f"write {key}:0.8")
        return number

    return read


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Read `4`, or `[256:1,512:2,>:4]`: up to 512 MiB none, up to 1 GiB 2, above 4.

    As in PyTorch, the first interval's value holds below it, too; intervals that are not listed have none.
    """
    if not value.startswith("["):
        return (_power_of_two(key, value),) * NUM_INTERVALS
    divisions = [0] * NUM_INTERVALS
    last = -1
    for entry in value.strip("[]").split(",") if value.endswith("]") else [value]:
        boundary, _, count = entry.partition(":")
        number = 0 if count == "0" else _power_of_two(key, count, entry=entry)
        if boundary == ">":
            # PyTorch counts from the interval after the last one, and after the first one if none came before.
            start = max(last, 0) + 1
            divisions[start:] = [number] * (NUM_INTERVALS - start)
        else:
            index = min(_power_of_two(key, boundary, entry=entry).bit_length() - 1, NUM_INTERVALS - 1)
            if last < 0:
                divisions[:index] = [number] * index
            divisions[index] = number
            last = index
    return tuple(divisions)


def _power_of_two(key: str, text: str, *, entry: str | None = None) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number == 0 or number & (number - 1):
        raise _Mistake(
            f"{key} is '{text}'" if entry is None else f"{key} has the entry '{entry}'",
            expected="a power of two, or a list such as [256:1,512:2,>:4] of MiB and divisions, both powers of two",
            fix=f"write {key}:4",
        )
    return number


def _backend(key: str, value: str) -> None:
    if value == "cudaMallocAsync":
        raise _Mistake(
            "backend:cudaMallocAsync cannot be simulated: CUDA's driver, not PyTorch, decides what is reserved",
            expected="backend:native",
            fix="remove it to predict for PyTorch's own allocator, or measure on the GPU",
        )
    if value != "native":
        raise _Mistake(f"{key} is '{value}'", expected="native", fix="remove it; native is the default")


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction(ends=False)),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction(ends=True)),
    "backend": ("", _backend),
}


_WITHOUT_EFFECT = (
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",  # how running out of memory is reported, not when it happens
)


def _too_small(fields: Mapping[str, Any]) -> list[_Mistake]:
    """Find the sizes below PyTorch's lower bounds, which depend on the segment's size."""
    segment_bytes = fields.get("large_segment_bytes", 20 * _MIB)
    mistakes = []
    if segment_bytes <= 10 * _MIB:
        what = f"large_segment_size_mb is {segment_bytes // _MIB}"
        mistakes.append(_Mistake(what, expected="more than 10 MiB", fix="write large_segment_size_mb:20, the default"))
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        num_bytes = fields.get(_READERS[key][0])
        if num_bytes is not None and num_bytes < segment_bytes:
            least = segment_bytes // _MIB
            expected = f"at least {least} MiB, the size of a segment"
            mistakes.append(_Mistake(f"{key} is {num_bytes // _MIB}", expected=expected, fix=f"write {key}:{least}"))
    return mistakes
