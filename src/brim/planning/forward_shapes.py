"""Forward passes over rows with answers, without gradients, each shape traced at most once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.compose import Binding, compose_parts, play
from brim.memory.config_workload import ConfigWorkload
from brim.memory.device import Device
from brim.memory.events import EventStream, Place
from brim.memory.recording import Recording, record
from brim.memory.work import WorkCount
from brim.models.chunked_loss import chunk_rows, fullest_chunks
from brim.planning.memory_samples import LEAST_TOKENS
from brim.planning.overhead import least_capacity, most_demanding
from brim.planning.shape_cache import Basics, KnownShapes, Shape, ShapeCache
from brim.planning.traced_shapes import as_on_device, live_bytes, undisturbed

_PART = "evaluate"


class ForwardShapes:
    """What scoring takes on a device. Bytes are those that PyTorch has allocated, the weights among them.

    Each row is as long as the others and supervised throughout, which is the most that a shape can take.
    settings: None: PyTorch's defaults. cache_folder: None keeps nothing on disk.
    """

    def __init__(
        self,
        workload: ConfigWorkload,
        device: Device,
        *,
        settings: AllocatorSettings | None = None,
        cache_folder: Path | None = None,
    ) -> None:
        self.device, self.settings = device, settings or AllocatorSettings()
        self.num_traced = 0
        self._workload = workload
        self._traced = workload.evaluation()
        self._recordings: dict[Shape, Recording] = {}
        self._cache = None if cache_folder is None else ShapeCache(cache_folder, self._facts())
        self.known = KnownShapes() if self._cache is None else self._cache.read()

    @property
    def note(self) -> str | None:
        """What was wrong with the file on disk, if anything was."""
        return None if self._cache is None else self._cache.note

    @property
    def basics(self) -> Basics:
        """What is there whatever the shape; nothing of an optimizer."""
        if self.known.basics is None:
            self.known.basics = self._basics()
        return self.known.basics

    def peak_bytes(self, rows: int, tokens: int) -> int:
        """At the peak of a pass, with the weights."""
        if (rows, tokens) not in self.known.peaks_bytes:
            recording = self._recording(rows, tokens)
            live = live_bytes(recording.stream, self.device, self.settings)
            peak_bytes = int(live[slice(*recording.parts[_PART])].max())
            self.known.peaks_bytes[rows, tokens] = peak_bytes + self.basics.unrecorded_bytes
        return self.known.peaks_bytes[rows, tokens]

    def work(self, rows: int, tokens: int) -> WorkCount:
        """Kernels of a pass."""
        if (rows, tokens) not in self.known.work:
            self._recording(rows, tokens)
        return self.known.work[rows, tokens]

    def overhead_bytes(self, used: Sequence[Shape]) -> int:
        """What must be free beyond what is allocated, so that passes of the shapes that take the most run; 0 on a CPU.

        See planning/overhead.py. used: (rows, tokens) of the passes.
        """
        if self.device.is_cpu:
            return 0
        demanding = most_demanding(used)
        key = " ".join(f"{rows}x{tokens}" for rows, tokens in demanding) + f" {self.settings}"
        if key not in self.known.overheads_bytes:
            recordings = [self._recording(rows, tokens) for rows, tokens in demanding]
            stream = as_on_device(_passes(recordings), recordings[0], self._workload, self.device)
            peak_bytes = int(live_bytes(stream, self.device, self.settings).max())
            capacity_bytes = least_capacity(stream, self.settings, peak_bytes=peak_bytes)
            self.known.overheads_bytes[key] = capacity_bytes - peak_bytes
        return self.known.overheads_bytes[key]

    def save(self) -> None:
        """Keep on disk what was found."""
        if self._cache is not None and self.num_traced:
            self._cache.write(self.known)

    def _recording(self, rows: int, tokens: int) -> Recording:
        if (rows, tokens) not in self._recordings:
            self.num_traced += 1
            with undisturbed(), fullest_chunks():
                found = record(self._traced, rows=rows, tokens=tokens)
            self._recordings[rows, tokens] = found
            self.known.work[rows, tokens] = found.work[_PART]
        return self._recordings[rows, tokens]

    def _basics(self) -> Basics:
        recording = self._recording(1, LEAST_TOKENS)
        stream = compose_parts(recording, ["load", _PART])
        composed = as_on_device(stream, recording, self._workload, self.device)
        live = live_bytes(composed, self.device, self.settings)
        begin = next(position for position, label in composed.marks if label == _PART)
        workspace_bytes = sum(
            size for size, category in zip(composed.sizes, composed.categories, strict=True) if category == "workspace"
        )
        recorded = live_bytes(recording.stream, self.device, self.settings)[recording.parts[_PART][0] - 1]
        return Basics(
            static_bytes=int(recorded) + workspace_bytes,
            state_bytes=0,
            unrecorded_bytes=workspace_bytes,
            first_update_bytes=0,
            update_bytes=0,
            load_bytes=int(live[:begin].max()),
            chunk_positions=self._chunk_positions(),
        )

    def _chunk_positions(self) -> int | None:
        if not self._workload.has_chunked_loss:
            return None
        return chunk_rows(self._traced.architecture.get_text_config().vocab_size, head_trains=False)

    def _facts(self) -> dict[str, object]:
        return {
            **self._workload.facts,
            "phase": _PART,
            "device": None if self.device.is_cpu else (self.device.capability, self.device.memory_bytes),
            "rounding": None if self.device.is_cpu else self.settings.roundup_power2_divisions,
        }


def _passes(recordings: Sequence[Recording]) -> EventStream:
    """The load, then one pass of each shape, twice: the second time in what the first has left."""
    stream = EventStream()
    first = recordings[0]
    loaded: Binding = {}
    play(stream, first.stream, first.parts["load"], loaded, label="load")
    for storage, place in _inputs(first):
        stream.death(loaded.pop(storage), place)
    for number, recording in enumerate([*recordings, *recordings], start=1):
        recorded = recording.stream
        stream.mark(f"pass {number}")
        bound = {
            storage: stream.birth(recorded.sizes[storage], recorded.categories[storage], place)
            for storage, place in _inputs(recording)
        }
        play(stream, recorded, recording.parts[_PART], bound)
    stream.mark("end")
    return stream


def _inputs(recording: Recording) -> list[tuple[int, Place]]:
    """Storages that are there before the pass and go with it: the batch; and where each goes."""
    stream, born = recording.stream, set()
    inputs = []
    for position in range(*recording.parts[_PART]):
        storage, place = stream.storages[position], stream.places[position]
        if storage >= 0:
            born.add(storage)
        elif ~storage not in born:
            inputs.append((~storage, place))
    return inputs
