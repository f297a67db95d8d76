"""PyTorch's record of its CUDA allocator, read: memory over time, an event stream, what stayed. Torch-free.

An entry is what `torch.cuda.memory._snapshot()["device_traces"]` holds: action, addr, size, time_us, frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.memory.events import EventStream, Place
from brim.memory.measure.result import Stayed

Entry: TypeAlias = Mapping[str, Any]

_ROUNDING_BYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp; entries hold what was asked for
_BORN, _DEAD = "alloc", "free_completed"
_MORE, _LESS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory after each entry: E points."""

    times_us: NDArray[np.int64]
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]


def curve(entries: Sequence[Entry], *, allocated_bytes: int, reserved_bytes: int) -> Curve:
    """The two figures are those before the first entry.

    Allocated is rounded to 512 bytes; the allocator counts a little more where it left a block whole.
    """
    allocated = [
        _rounded(entry["size"]) * ((entry["action"] == _BORN) - (entry["action"] == _DEAD)) for entry in entries
    ]
    reserved = [entry["size"] * ((entry["action"] in _MORE) - (entry["action"] in _LESS)) for entry in entries]
    return Curve(
        times_us=np.asarray([entry.get("time_us", 0) for entry in entries], dtype=np.int64),
        allocated_bytes=allocated_bytes + np.cumsum(np.asarray(allocated, dtype=np.int64)),
        reserved_bytes=reserved_bytes + np.cumsum(np.asarray(reserved, dtype=np.int64)),
    )


def stream(entries: Sequence[Entry], place_of: Callable[[Entry], Place]) -> EventStream:
    """Births and deaths in their order; what dies without having been born is born first.

    The categories are not known: all are called "temporary".
    """
    found = EventStream()
    born: dict[int, int] = {}
    before = Place("load")
    for address, size in _older(entries).items():
        born[address] = found.birth(size, "temporary", before)
    for entry in entries:
        if entry["action"] == _BORN:
            born[entry["addr"]] = found.birth(entry["size"], "temporary", place_of(entry))
        elif entry["action"] == _DEAD:
            found.death(born.pop(entry["addr"]), place_of(entry))
    return found


def stayed(entries: Sequence[Entry], *, since_us: int, where: Callable[[Entry], str]) -> tuple[Stayed, ...]:
    """What was born after a time and is still alive at the end; blocks of one size and place together."""
    alive: dict[int, Entry] = {}
    for entry in entries:
        if entry["action"] == _BORN and entry.get("time_us", 0) >= since_us:
            alive[entry["addr"]] = entry
        elif entry["action"] == _DEAD:
            alive.pop(entry["addr"], None)
    kept: dict[tuple[int, str], int] = {}
    for entry in alive.values():
        kind = (entry["size"], where(entry))
        kept[kind] = kept.get(kind, 0) + 1
    found = [
        Stayed(count=count, num_bytes=count * size, shape=None, dtype=None, made_at=made_at)
        for (size, made_at), count in kept.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.num_bytes))


def line_of(entry: Entry) -> str:
    """The line of Python that asked for the memory: the innermost one outside PyTorch, else the innermost."""
    frames = entry.get("frames") or []
    outside = [frame for frame in frames if "/torch/" not in frame["filename"]]
    for frame in [*outside, *frames]:
        name = str(frame["filename"]).rpartition("/")[2]
        return f"{name}:{frame['line']} ({frame['name']})"
    return ""


def _older(entries: Sequence[Entry]) -> dict[int, int]:
    """Address and bytes of what was alive before the first entry, as far as it dies."""
    born: set[int] = set()
    found: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == _BORN:
            born.add(entry["addr"])
        elif entry["action"] == _DEAD and entry["addr"] not in born:
            found.setdefault(entry["addr"], entry["size"])
    return found


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES
