"""Trace micro-batches of one strategy, each shape at most once, and keep on disk what the traces found.

A trace gives peaks, kernels and streams; from steps of a plan's own shapes follows what PyTorch's caching allocator
needs beyond what is allocated. Later runs of the same model need no traces.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory import ConfigWorkload, Device
from brim.memory.allocator import AllocatorSettings, CachingAllocator, SimulatedOutOfMemory, replay
from brim.memory.trace import (
    EventStream,
    OptimizerRecording,
    Recording,
    Work,
    WorkCount,
    Workload,
    WorkPlace,
    compose_steps,
    compose_training,
    record,
    record_optimizer,
    with_workspaces,
)
from brim.models import chunk_rows, fullest_chunks
from brim.planning.costs.sampling import LEAST_TOKENS, Shape, round_length
from brim.storage import Cache, digest, source_digest

MOST_SHAPES = 4  # each is a trace


_SHARES = (1.01, 1.02, 1.04, 1.06, 1.09, 1.13, 1.18, 1.25, 1.35)  # of the peak: capacities that are tried


_DEVICE_BYTES = 2**44  # expandable segments reserve address space by it


_GRAIN = 2 ** (1 / 8)  # padded tokens are rounded up to its powers, so that like plans meet the same shapes


def overhead_bytes(shapes: TracedShapes, used: Sequence[Shape]) -> int:
    """What must be free beyond what is allocated, so that steps of the shapes that take the most run. 0 on a CPU.

    Left alone, the allocator reserves more, up to half as much again: it keeps blocks that the next shape finds too
    small. With nothing left to reserve it gives back those that are whole, and goes on; so the least capacity with
    which it gets through counts. used: (rows, tokens) of the plan's micro-batches.
    """
    if shapes.device.is_cpu:
        return 0
    demanding = most_demanding(used)
    key = " ".join(f"{rows}x{tokens}" for rows, tokens in demanding) + f" {shapes.settings}"
    known = shapes.known.overheads_bytes
    if key not in known:
        recordings = [shapes.recording(rows, tokens) for rows, tokens in demanding]
        stream = compose_steps(_steps(recordings, shapes.micro_batches), shapes.optimizer)
        stream = shapes.on_device(stream, recordings[0])
        peak_bytes = int(shapes.live_bytes(stream).max())
        known[key] = least_capacity(stream, shapes.settings, peak_bytes=peak_bytes) - peak_bytes
        shapes.save()
    return known[key]


def least_capacity(stream: EventStream, settings: AllocatorSettings, *, peak_bytes: int) -> int:
    """Bytes with which the allocator gets through the stream, as with all larger ones that were tried.

    peak_bytes: allocated at the stream's peak.
    """
    settings = replace(settings, per_process_memory_fraction=1.0)
    alone = CachingAllocator(settings=settings, device_bytes=_DEVICE_BYTES)
    replay(stream, alone)
    tried = [round(share * peak_bytes) for share in _SHARES if share * peak_bytes < alone.peak_reserved_bytes]
    enough = alone.peak_reserved_bytes
    low, high = 0, len(tried)  # all from `high` on are enough
    while low < high:
        middle = (low + high) // 2
        if _gets_through(stream, settings, tried[middle]):
            enough, high = tried[middle], middle
        else:
            low = middle + 1
    return max(enough, peak_bytes)


def most_demanding(used: Sequence[Shape]) -> list[Shape]:
    """At most `MOST_SHAPES` of those with the most tokens, no two of about the same; the longest rows first."""
    longest = max(tokens for _, tokens in used)
    rounded: dict[Shape, None] = {}
    for rows, tokens in sorted(set(used), key=lambda shape: (shape[0] * shape[1], shape[1]), reverse=True):
        rounded[_rounded(rows, tokens, longest)] = None
    return sorted(list(rounded)[:MOST_SHAPES], key=lambda shape: (shape[1], shape[0]), reverse=True)


def _rounded(rows: int, tokens: int, longest: int) -> Shape:
    """A shape that stands for all of about its length and number of tokens, never one of fewer tokens."""
    length = min(round_length(tokens), longest)
    if rows == 1:
        return 1, length
    power = math.ceil(round(math.log(rows * tokens, _GRAIN), 6))
    return math.ceil(round(_GRAIN**power / length, 6)), length


def _steps(recordings: Sequence[Recording], micro_batches: int) -> list[list[Recording]]:
    """A step without the shape that takes the most, then one with it, as the rows come."""
    if micro_batches == 1:
        return [[recording] for recording in reversed(recordings)]
    return [
        list(recordings[1:]) or [recordings[0]] * 2,
        list(recordings) if len(recordings) > 1 else [recordings[0]] * 2,
    ]


def _gets_through(stream: EventStream, settings: AllocatorSettings, capacity_bytes: int) -> bool:
    allocator = CachingAllocator(settings=settings, capacity_bytes=capacity_bytes, device_bytes=capacity_bytes)
    try:
        replay(stream, allocator)
    except SimulatedOutOfMemory:
        return False
    return True


_KEPT_RECORDINGS = 16  # of about 10 MB each for a model of 32 layers


class TracedShapes:
    """What one way takes on a device: the configuration says whether it checkpoints and how it computes its loss.

    Bytes are those that PyTorch has allocated. Each row is as long as the others and supervised throughout, which is
    the most that a shape can take.

    workload: its trainer's gradient checkpointing and chunked loss are set. is_single: every step is one micro-batch,
    so that none finds gradients at hand. settings: None: PyTorch's defaults. cache_folder: None keeps nothing on disk.
    """

    def __init__(
        self,
        workload: ConfigWorkload,
        device: Device,
        *,
        is_single: bool = False,
        settings: AllocatorSettings | None = None,
        cache_folder: Path | None = None,
    ) -> None:
        self.device, self.settings = device, settings or AllocatorSettings()
        self.num_traced = 0
        self._workload = workload
        self._traced = _as_planned(workload.training(), is_single=is_single)
        assert self._traced.training is not None
        self.micro_batches = 2 if self._traced.training.accumulates else 1
        self._recordings: dict[Shape, Recording] = {}
        self._optimizer: OptimizerRecording | None = None
        self._cache = None if cache_folder is None else ShapeCache(cache_folder, self._facts())
        self.known = KnownShapes() if self._cache is None else self._cache.read()

    @property
    def note(self) -> str | None:
        """What was wrong with the file on disk, if anything was."""
        return None if self._cache is None else self._cache.note

    @property
    def basics(self) -> Basics:
        """What is there whatever the shape."""
        if self.known.basics is None:
            self.known.basics = self._basics()
        return self.known.basics

    @property
    def update_work(self) -> WorkCount:
        """Kernels of the optimizer's step once its state is there."""
        if self.known.update_work is None:
            self.known.update_work = self.optimizer.work["steady"]
        return self.known.update_work

    def peak_bytes(self, rows: int, tokens: int) -> int:
        """At the peak of a micro-batch, with weights, gradients and the optimizer's state at hand."""
        shape = (rows, tokens)
        if shape not in self.known.peaks_bytes:
            live = self.live_bytes(self.recording(rows, tokens).stream)
            start, end = self._micro_batches_of(self.recording(rows, tokens))
            self.known.peaks_bytes[shape] = int(live[start:end].max()) + self.basics.unrecorded_bytes
        return self.known.peaks_bytes[shape]

    def work(self, rows: int, tokens: int) -> WorkCount:
        """Kernels of a micro-batch, forward and backward."""
        if (rows, tokens) not in self.known.work:
            self.recording(rows, tokens)
        return self.known.work[rows, tokens]

    def recording(self, rows: int, tokens: int) -> Recording:
        """The micro-batch's stream."""
        shape = (rows, tokens)
        if shape not in self._recordings:
            found = self._record(rows, tokens)
            while len(self._recordings) >= _KEPT_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[shape] = found
            self.known.work[shape] = found.work[_last_part(found)]
        return self._recordings[shape]

    @property
    def optimizer(self) -> OptimizerRecording:
        """The stream of the optimizer's step."""
        if self._optimizer is None:
            recording = self.recording(1, LEAST_TOKENS)
            with undisturbed():
                self._optimizer = record_optimizer(self._traced, recording)
        return self._optimizer

    def on_device(self, stream: EventStream, recording: Recording) -> EventStream:
        """The stream with what only a GPU does: weights that arrive one by one, cuBLAS' workspaces.

        recording: the one of which the stream was composed first.
        """
        return as_on_device(stream, recording, self._workload, self.device)

    def live_bytes(self, stream: EventStream) -> NDArray[np.int64]:
        """Allocated after each event, blocks in the sizes that the allocator rounds them to."""
        return live_bytes(stream, self.device, self.settings)

    def save(self) -> None:
        """Keep on disk what was found."""
        if self._cache is not None and self.num_traced:
            self._cache.write(self.known)

    def _record(self, rows: int, tokens: int) -> Recording:
        self.num_traced += 1
        with undisturbed(), fullest_chunks():
            return record(self._traced, rows=rows, tokens=tokens)

    def _micro_batches_of(self, recording: Recording) -> tuple[int, int]:
        """Events from, to."""
        return recording.parts["first"][0], recording.parts[_last_part(recording)][1]

    def _basics(self) -> Basics:
        recording = self.recording(1, LEAST_TOKENS)
        stream = compose_training([recording, recording], self.optimizer, micro_batches=self.micro_batches)
        stream = self.on_device(stream, recording)
        live = self.live_bytes(stream)
        parts = {label: (start, end) for (start, label), (end, _) in pairwise(stream.marks)}
        last = "step 2, micro-batch 2" if self.micro_batches > 1 else "step 2"
        static_bytes = int(live[parts[last][0] - 1])
        recorded = self.live_bytes(recording.stream)[recording.parts[_last_part(recording)][0] - 1]
        unrecorded_bytes = static_bytes - int(recorded)
        return Basics(
            static_bytes=static_bytes,
            state_bytes=unrecorded_bytes - _workspace_bytes(stream),
            unrecorded_bytes=unrecorded_bytes,
            first_update_bytes=int(live[slice(*parts["step 1: optimizer"])].max()),
            update_bytes=int(live[slice(*parts["step 2: optimizer"])].max()),
            load_bytes=int(live[slice(*parts["load"])].max()),
            chunk_positions=self._chunk_positions(recording),
        )

    def _chunk_positions(self, recording: Recording) -> int | None:
        if not self._workload.has_chunked_loss:
            return None
        vocabulary = self._traced.architecture.get_text_config().vocab_size
        trains = any(weight.shape[:1] == (vocabulary,) for weight in recording.trained)
        return chunk_rows(vocabulary, head_trains=trains)

    def _facts(self) -> dict[str, object]:
        return {
            **self._workload.facts,
            "micro_batches": self.micro_batches,
            "device": None if self.device.is_cpu else (self.device.capability, self.device.memory_bytes),
            "rounding": None if self.device.is_cpu else self.settings.roundup_power2_divisions,
        }


def as_on_device(stream: EventStream, recording: Recording, workload: ConfigWorkload, device: Device) -> EventStream:
    """See TracedShapes.on_device."""
    if device.is_cpu:
        return stream
    stream = workload.with_loading(stream, recording, device_bytes=device.memory_bytes)
    return with_workspaces(stream, device.cublas_workspace_bytes)


def live_bytes(stream: EventStream, device: Device, settings: AllocatorSettings) -> NDArray[np.int64]:
    """Allocated after each event, blocks in the sizes that the device's allocator rounds them to."""
    sizes = np.array(stream.sizes, dtype=np.int64)
    if not device.is_cpu:
        distinct, where = np.unique(sizes, return_inverse=True)
        rounded = [settings.rounded_bytes(int(size)) if size else 0 for size in distinct]
        sizes = np.array(rounded, dtype=np.int64)[where]
    storages = np.array(stream.storages, dtype=np.int64)
    of_event = sizes[np.maximum(storages, ~storages)]
    return np.cumsum(np.where(storages >= 0, of_event, -of_event))


def _as_planned(traced: Workload, *, is_single: bool) -> Workload:
    assert traced.training is not None
    return replace(traced, training=replace(traced.training, accumulates=traced.training.accumulates and not is_single))


def _last_part(recording: Recording) -> str:
    return "next" if "next" in recording.parts else "first"


def _workspace_bytes(stream: EventStream) -> int:
    sizes = zip(stream.sizes, stream.categories, strict=True)
    return sum(size for size, category in sizes if category == "workspace")


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is built may draw numbers; and each shape leaves about a megabyte in PyTorch's cache of fake results."""
    with torch.random.fork_rng(devices=()):
        yield
    FakeTensorMode.cache_clear()


_KIND = "traces"


_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


# What a trace runs; a change in it makes what earlier traces found worthless.
_TRACED_PACKAGES = ("data", "memory", "models", "planning", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Basics:
    """What a way takes whatever the shape; bytes that PyTorch has allocated."""

    static_bytes: int  # before a micro-batch: weights, optimizer state, gradients if steps have several, workspaces
    state_bytes: int  # of them the optimizer's state
    unrecorded_bytes: int  # of them what a micro-batch's own trace does not know: state and workspaces
    first_update_bytes: int  # peak of the optimizer's step that bears its state
    update_bytes: int  # and of those that find it
    load_bytes: int  # peak of the load of the weights
    chunk_positions: int | None  # of a full chunk of the loss; None: all logits stand at once


@dataclass(slots=True, kw_only=True)
class KnownShapes:
    """What is known of one way on one kind of device."""

    basics: Basics | None = None
    peaks_bytes: dict[Shape, int] = field(default_factory=dict)
    work: dict[Shape, WorkCount] = field(default_factory=dict)  # of a micro-batch
    update_work: WorkCount | None = None  # of the optimizer's step
    overheads_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, other: KnownShapes) -> None:
        """Take what the other knows and this does not."""
        self.basics = self.basics or other.basics
        self.update_work = self.update_work or other.update_work
        self.peaks_bytes = {**other.peaks_bytes, **self.peaks_bytes}
        self.work = {**other.work, **self.work}
        self.overheads_bytes = {**other.overheads_bytes, **self.overheads_bytes}


class ShapeCache:
    """What is kept of one way.

    facts: all that a trace depends on, beside the versions of the packages.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._cache = Cache(folder, _KIND)
        self._name = digest({"facts": facts, "versions": versions()})

    @property
    def note(self) -> str | None:
        """What was wrong with it, if anything was."""
        return self._cache.note

    def read(self) -> KnownShapes:
        """What is kept; nothing where nothing is, or what is damaged."""
        saved = self._cache.read(self._name)
        if saved is None:
            return KnownShapes()
        try:
            return _parsed(saved)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._cache.refuse(self._name)
            return KnownShapes()

    def write(self, known: KnownShapes) -> None:
        """Keep what is known; what another run has found meanwhile stays."""
        known.add(self.read())
        self._cache.write(self._name, _as_json(known))


@cache
def versions() -> dict[str, str]:
    """Of the packages that a trace runs, and of brim's own code, which changes between releases, too."""
    found = {"brim": source_digest(_TRACED_PACKAGES)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _as_json(known: KnownShapes) -> dict[str, Any]:
    return {
        "basics": None if known.basics is None else asdict(known.basics),
        "peaks_bytes": [[*shape, peak] for shape, peak in sorted(known.peaks_bytes.items())],
        "work": [[*shape, places_as_json(work)] for shape, work in sorted(known.work.items())],
        "update_work": None if known.update_work is None else places_as_json(known.update_work),
        "overheads_bytes": known.overheads_bytes,
    }


def _parsed(saved: Any) -> KnownShapes:
    basics, update_work = saved["basics"], saved["update_work"]
    return KnownShapes(
        basics=None if basics is None else Basics(**{key: _whole(value) for key, value in basics.items()}),
        peaks_bytes={(_whole(rows), _whole(tokens)): _whole(peak) for rows, tokens, peak in saved["peaks_bytes"]},
        work={(_whole(rows), _whole(tokens)): work_from_json(places) for rows, tokens, places in saved["work"]},
        update_work=None if update_work is None else work_from_json(update_work),
        overheads_bytes={str(key): _whole(value) for key, value in saved["overheads_bytes"].items()},
    )


def places_as_json(work: WorkCount) -> list[list[Any]]:
    """All kernels."""
    return [[*place, each.flops, each.num_bytes, each.kernels] for place, each in work.places.items()]


def work_from_json(places: Any) -> WorkCount:
    """What `places_as_json` gave; of anything else a TypeError or ValueError."""
    return WorkCount(
        places={
            WorkPlace(*place): Work(_whole(flops), _whole(num_bytes), _whole(kernels))
            for *place, flops, num_bytes, kernels in places
        }
    )


def _whole(value: Any) -> Any:
    """A number as it was written; None where a field may be."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(value)
    return value
