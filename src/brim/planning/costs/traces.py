"""Trace what a workload does, each shape at most once, and keep on disk what the traces found.

A workload says what is recorded of a shape and what a recording tells; it is one class of costs/workloads.py. Later
runs of the same model need no traces. From the streams of a plan's own shapes follows what PyTorch's caching
allocator needs beyond what is allocated.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Strict, TypeAdapter
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.batching import Costs, Surface
from brim.memory import ConfigWorkload
from brim.memory.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory, replay
from brim.memory.devices import Device, DeviceSpeed, device_speed
from brim.memory.events import EventStream, Work, WorkCount, WorkPlace
from brim.memory.fsdp import Sharding, shard
from brim.memory.trace import Recording, with_workspaces
from brim.planning.costs.sampling import Shape, region, round_length, sampled, short_length, through
from brim.planning.costs.time import TimeEstimate, shapes_to_count
from brim.storage import Cache, digest, source_digest

Key: TypeAlias = tuple[int, ...]  # a shape: rows and tokens, or a CacheShape's numbers; (): whatever the shape


_KIND = "traces"


CudaStreams: TypeAlias = Sequence[int] | None  # that each storage is allocated on; None: all on one


_KEPT_RECORDINGS = 16  # of about 10 MB each for a model of 32 layers


Names: TypeAlias = tuple[str, ...]


class TracedWorkload(Protocol):
    """Describe what brim runs, and how it is traced."""

    config: ConfigWorkload
    facts: Mapping[str, object]  # all that its traces depend on, beside the device and the versions
    names: tuple[Names, Names]  # of the numbers and the work that are found: whatever the shape, and of a shape

    def record(self, shape: Key) -> Recording:
        """Return the recording of one shape."""

    def find(self, traces: Traces, shape: Key) -> Found:
        """Return what the recording of a shape tells; of `()` what is there whatever the shape."""

    def job(self, traces: Traces, shapes: Sequence[Key]) -> EventStream:
        """Return the stream of what passes through these shapes, one after the other, for the allocator."""


@dataclass(frozen=True, slots=True)
class Found:
    """Hold what is known of a shape."""

    numbers: Mapping[str, int]  # mostly bytes that PyTorch has allocated
    work: Mapping[str, WorkCount]  # kernels


@dataclass(slots=True, kw_only=True)
class Known:
    """Hold what is known of a workload on one kind of device."""

    found: dict[Key, Found] = field(default_factory=dict)
    overheads_bytes: dict[str, int] = field(default_factory=dict)


class Traces:
    """Trace what a workload takes on a device, for each shape that is asked for.

    Bytes are those that PyTorch has allocated. Each row is as long as the others and supervised throughout, which is
    the most that a shape can take. settings: of the allocator; None: PyTorch's defaults. folder: of the cache; None
    keeps nothing on disk. sharding: of weights and state, of which the device is then one rank's; None: all is there.
    like: of the same workload, which is recorded alike where it is sharded and where it is not.
    """

    def __init__(
        self,
        workload: TracedWorkload,
        device: Device,
        *,
        settings: AllocatorSettings | None = None,
        folder: Path | None = None,
        sharding: Sharding | None = None,
        like: Traces | None = None,
    ) -> None:
        self.workload, self.device, self.settings = workload, device, settings or AllocatorSettings()
        self.sharding = sharding
        self.num_traced = 0
        self.asked: set[Key] = set()  # what else is known is of other plans, and must not change this one
        self._recordings: dict[Key, Recording] = {} if like is None else like._recordings
        self._has_news = False  # for the disk
        self._cache = None if folder is None else Cache(folder, _KIND)
        of_gpu = {
            "device": (device.capability, device.memory_bytes),
            "rounding": self.settings.roundup_power2_divisions,
        }
        facts = {**workload.facts, **(dict.fromkeys(of_gpu) if device.is_cpu else of_gpu), "sharding": str(sharding)}
        self._name = digest({"facts": facts, "versions": versions()})
        self._known = self._read()

    @property
    def note(self) -> str | None:
        """Return what was wrong with the file on disk, if anything was."""
        return None if self._cache is None else self._cache.note

    @property
    def basics(self) -> Mapping[str, int]:
        """Return what is there whatever the shape, by the workload's names."""
        return self.find(()).numbers

    def find(self, shape: Key) -> Found:
        """Return what is known of a shape, which is traced where nothing is."""
        self.asked.add(shape)
        if shape not in self._known.found:
            self._known.found[shape] = self.workload.find(self, shape)
            self._has_news = True
        return self._known.found[shape]

    @cached_property
    def speed(self) -> DeviceSpeed:
        """Return what the device computes and reads in a second."""
        return device_speed(self.device, num_cores=torch.get_num_threads())

    def peak_surface(
        self, lengths: ArrayLike, *, most_rows: int, cap_bytes: int, context_length: int | None
    ) -> Surface:
        """Return the peak of every shape that rows of these lengths give, by a few traces, best near the cap.

        lengths: tokens of each row. most_rows: of a micro-batch. cap_bytes: what may be allocated at most, as far as it
        is known. context_length: tokens that the model takes at most; None: no limit.
        """
        where = region(
            lengths,
            most_rows=most_rows,
            cap_bytes=cap_bytes,
            context=context_length,
            chunk_positions=self.basics["chunk_positions"],
        )
        found = sampled(self.peak_bytes, where)
        self.save()
        return found

    def verified(self, costs: Costs, *, rows: int, tokens: int) -> Costs:
        """Return the costs after one more trace, such as of the widest micro-batch of a plan: exact there."""
        peak = through(costs.peak, rows * tokens, tokens, self.peak_bytes(rows, tokens))
        self.save()
        return replace(costs, peak=peak)

    def time(
        self, lengths: NDArray[np.int64], *, longest: int, wide: int, most_rows: int, known: Sequence[Shape] = ()
    ) -> TimeEstimate:
        """Return the seconds of every shape that rows of these lengths give, by the work of a few.

        known: shapes to go by; those that are missing are traced: of rows of `longest` tokens, and `wide` short rows.
        most_rows: of a micro-batch.
        """
        missing = shapes_to_count(known, longest=longest, short=short_length(lengths), most_rows=wide)
        return TimeEstimate.of(
            {shape: self.work(*shape) for shape in (*known, *missing)},
            self.speed,
            longest=int(lengths.max()),
            shortest=int(lengths.min()),
            most_rows=most_rows,
        )

    def peak_bytes(self, rows: int, tokens: int) -> int:
        """Return the peak of a micro-batch, with all that is there whatever the shape."""
        return self.find((rows, tokens)).numbers["peak"] + self.basics["unrecorded"]

    def work(self, rows: int, tokens: int) -> WorkCount:
        """Return the kernels of a micro-batch."""
        return self.find((rows, tokens)).work["pass"]

    def recording(self, shape: Key) -> Recording:
        """Return the recording of a shape; the last ones are kept."""
        if shape not in self._recordings:
            self.num_traced += 1
            with undisturbed():
                found = self.workload.record(shape)
            while len(self._recordings) >= _KEPT_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[shape] = found
        return self._recordings[shape]

    def on_device(self, stream: EventStream, recording: Recording) -> EventStream:
        """Return the stream with what only a GPU does: weights that arrive one by one, cuBLAS' workspaces.

        recording: the one of which the stream was composed first. Where weights are sharded, the stream is a rank's.
        """
        return self._of_rank(stream, recording)[0]

    def _of_rank(self, stream: EventStream, recording: Recording) -> tuple[EventStream, CudaStreams]:
        if not self.device.is_cpu:
            stream = self.workload.config.with_loading(
                stream,
                recording,
                device_bytes=self.device.memory_bytes,
                is_sharded=self.sharding is not None and self.sharding.shards,
            )
            stream = with_workspaces(stream, self.device.cublas_workspace_bytes)
        if self.sharding is None:
            return stream, None
        found = shard(stream, recording.weights, self.sharding)
        return found.stream, found.cuda_streams

    def live_bytes(self, stream: EventStream) -> NDArray[np.int64]:
        """Return what is allocated after each event, blocks in the sizes that the allocator rounds them to."""
        sizes = np.array(stream.sizes, dtype=np.int64)
        if not self.device.is_cpu:
            distinct, where = np.unique(sizes, return_inverse=True)
            rounded = [self.settings.rounded_bytes(int(size)) if size else 0 for size in distinct]
            sizes = np.array(rounded, dtype=np.int64)[where]
        storages = np.array(stream.storages, dtype=np.int64)
        of_event = sizes[np.maximum(storages, ~storages)]
        return np.cumsum(np.where(storages >= 0, of_event, -of_event))

    def overhead_of(self, used: Sequence[Shape]) -> int:
        """Return `overhead_bytes` of a job that uses these shapes, by the most demanding of them."""
        return self.overhead_bytes(most_demanding(used))

    def overhead_bytes(self, shapes: Sequence[Key]) -> int:
        """Return what must be free beyond what is allocated, so that a job of these shapes runs. 0 on a CPU.

        Left alone, the allocator reserves more, up to half as much again: it keeps blocks that the next shape finds
        too small. With nothing left to reserve it gives back those that are whole, and goes on; so the least capacity
        with which it gets through counts.
        """
        if self.device.is_cpu:
            return 0
        name = " ".join("x".join(map(str, shape)) for shape in shapes) + f" {self.settings}"
        known = self._known.overheads_bytes
        if name not in known:
            stream, streams = self._of_rank(self.workload.job(self, shapes), self.recording(shapes[0]))
            peak_bytes = int(self.live_bytes(stream).max())
            known[name] = least_capacity(stream, self.settings, peak_bytes=peak_bytes, streams=streams) - peak_bytes
            self._has_news = True
            self.save()
        return known[name]

    def save(self) -> None:
        """Keep on disk what was found; what another run has found meanwhile stays."""
        if self._cache is None or not self._has_news:
            return
        other = self._read()
        self._known.found = {**other.found, **self._known.found}
        self._known.overheads_bytes = {**other.overheads_bytes, **self._known.overheads_bytes}
        self._cache.write(self._name, _as_json(self._known))

    def _read(self) -> Known:
        """Return what is kept; nothing where nothing is, or what is damaged."""

        def parse(saved: Any) -> Known:
            return _parsed(saved, self.workload.names)

        return (self._cache and self._cache.read(self._name, parse)) or Known()


# What the caching allocator needs

MOST_SHAPES = 4  # each is a trace


_SHARES = (1.01, 1.02, 1.04, 1.06, 1.09, 1.13, 1.18, 1.25, 1.35)  # of the peak: capacities that are tried


_DEVICE_BYTES = 2**44  # expandable segments reserve address space by it


_GRAIN = 2 ** (1 / 8)  # padded tokens are rounded up to its powers, so that like plans meet the same shapes


def least_capacity(
    stream: EventStream, settings: AllocatorSettings, *, peak_bytes: int, streams: CudaStreams = None
) -> int:
    """Return the bytes with which the allocator gets through the stream, as with all larger ones that were tried.

    peak_bytes: allocated at the stream's peak. streams: see CudaStreams.
    """
    settings = replace(settings, per_process_memory_fraction=1.0)
    alone = CachingAllocator(settings=settings, device_bytes=_DEVICE_BYTES)
    replay(stream, alone, cuda_streams=streams)
    tried = [round(share * peak_bytes) for share in _SHARES if share * peak_bytes < alone.peak_reserved_bytes]
    enough = alone.peak_reserved_bytes
    low, high = 0, len(tried)  # all from `high` on are enough
    while low < high:
        middle = (low + high) // 2
        if _gets_through(stream, settings, tried[middle], streams):
            enough, high = tried[middle], middle
        else:
            low = middle + 1
    return max(enough, peak_bytes)


def _gets_through(stream: EventStream, settings: AllocatorSettings, capacity_bytes: int, streams: CudaStreams) -> bool:
    allocator = CachingAllocator(settings=settings, capacity_bytes=capacity_bytes, device_bytes=capacity_bytes)
    try:
        replay(stream, allocator, cuda_streams=streams)
    except SimulatedOutOfMemory:
        return False
    return True


def most_demanding(used: Sequence[Shape]) -> list[Shape]:
    """Return at most `MOST_SHAPES` with the most tokens, no two of about the same; the longest rows first."""
    longest = max(tokens for _, tokens in used)
    rounded: dict[Shape, None] = {}
    for rows, tokens in sorted(set(used), key=lambda shape: (shape[0] * shape[1], shape[1]), reverse=True):
        rounded[_rounded(rows, tokens, longest)] = None
    return sorted(list(rounded)[:MOST_SHAPES], key=lambda shape: (shape[1], shape[0]), reverse=True)


def _rounded(rows: int, tokens: int, longest: int) -> Shape:
    """Return a shape that stands for all of about its length and number of tokens, never one of fewer tokens."""
    length = min(round_length(tokens), longest)
    if rows == 1:
        return 1, length
    power = math.ceil(round(math.log(rows * tokens, _GRAIN), 6))
    return math.ceil(round(_GRAIN**power / length, 6)), length


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore random states, and empty PyTorch's cache of fake results, in which a shape leaves about a megabyte."""
    with torch.random.fork_rng(devices=()):
        yield
    FakeTensorMode.cache_clear()


# What is kept on disk

_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


# The packages that a trace runs; a change in them makes earlier traces worthless.
_TRACED_PACKAGES = ("data", "memory", "models", "planning", "train")


@cache
def versions() -> dict[str, str]:
    """Return those of the packages that a trace runs, and of brim's own code, which changes between releases, too."""
    found = {"brim": source_digest(_TRACED_PACKAGES)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _as_json(known: Known) -> dict[str, Any]:
    return {
        "found": [
            [list(shape), dict(found.numbers), {name: _places(work) for name, work in found.work.items()}]
            for shape, found in sorted(known.found.items())
        ],
        "overheads_bytes": known.overheads_bytes,
    }


def _parsed(saved: Any, names: tuple[Names, Names]) -> Known:
    """Return what `_as_json` gave; of anything else an error. names: of a workload's numbers and work."""
    entries, overheads_bytes = _adapter().validate_python((saved["found"], saved["overheads_bytes"]))
    for shape, numbers, work in entries:
        if (*numbers, *work) != names[bool(shape)]:
            raise KeyError(shape)
    found = {
        shape: Found(numbers, {name: _work(places) for name, places in work.items()})
        for shape, numbers, work in entries
    }
    return Known(found=found, overheads_bytes=overheads_bytes)


def _places(work: WorkCount) -> list[list[Any]]:
    return [[*place, each.flops, each.num_bytes, each.kernels] for place, each in work.places.items()]


def _work(places: list[_Place]) -> WorkCount:
    return WorkCount(places={WorkPlace(*place[:6]): Work(*place[6:]) for place in places})


_Whole: TypeAlias = Annotated[int, Strict()]  # as it was written


_Place: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, _Whole, _Whole, _Whole]  # see `_places`


_Saved: TypeAlias = tuple[
    list[tuple[tuple[_Whole, ...], dict[str, _Whole], dict[str, list[_Place]]]], dict[str, _Whole]
]


@cache
def _adapter() -> TypeAdapter[_Saved]:
    return TypeAdapter(_Saved)
