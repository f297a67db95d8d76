"""Micro-batches of one way to train, each shape traced at most once: peaks, kernels and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.compose import compose_training, with_workspaces
from brim.memory.config_workload import ConfigWorkload
from brim.memory.device import Device
from brim.memory.events import EventStream
from brim.memory.optimizer_recording import OptimizerRecording, record_optimizer
from brim.memory.recording import Recording, record
from brim.memory.work import WorkCount
from brim.memory.workload import Workload
from brim.models.chunked_loss import chunk_rows, fullest_chunks
from brim.planning.memory_samples import LEAST_TOKENS
from brim.planning.shape_cache import Basics, KnownShapes, Shape, ShapeCache

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
