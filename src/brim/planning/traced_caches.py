"""Generation, each shape traced at most once: peaks, kernels and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brim.digests import source_digest
from brim.infer.cache_shape import CacheShape
from brim.infer.peak_passes import DECODE, FILL, PREFILL
from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.compose import Binding, compose_parts, play
from brim.memory.config_workload import ConfigWorkload
from brim.memory.device import Device
from brim.memory.events import EventStream
from brim.memory.recording import Recording, record
from brim.memory.static_stream import static_stream
from brim.memory.work import WorkCount
from brim.planning.cache import Cache, digest
from brim.planning.overhead import least_capacity
from brim.planning.shape_cache import places_as_json, versions, work_from_json
from brim.planning.traced_shapes import as_on_device, live_bytes, undisturbed

_KIND = "generation-traces"
_KEPT_RECORDINGS = 8
_TIMES = 2  # that a job's shapes are run through the allocator: what the first time leaves, the second one finds


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSample:
    """What a shape takes, in bytes that PyTorch has allocated, and what it computes."""

    shape: CacheShape
    loaded_bytes: int  # weights
    load_peak_bytes: int  # while they are loaded
    held_bytes: int  # between passes: weights, workspaces and the cache
    prefill_bytes: int  # that the pass over the prompts adds
    step_bytes: int  # that the pass over the last token of every row adds
    prefill_work: WorkCount
    step_work: WorkCount


class TracedCaches:
    """Samples of a configuration's generation on a device.

    is_slots: with brim's own engine; else with transformers' `generate`, whose cache grows with each token: what it
    adds to the weights is a step's, and none of it is held. cache_folder: None keeps nothing on disk.
    """

    def __init__(
        self,
        workload: ConfigWorkload,
        device: Device,
        *,
        is_slots: bool = True,
        settings: AllocatorSettings | None = None,
        cache_folder: Path | None = None,
    ) -> None:
        self.device, self.settings = device, settings or AllocatorSettings()
        self.num_traced = 0
        self._workload, self._is_slots = workload, is_slots
        self._recordings: dict[CacheShape, Recording] = {}
        self._samples: dict[CacheShape, CacheSample] = {}
        self._overheads_bytes: dict[str, int] = {}
        self._cache = None if cache_folder is None else Cache(cache_folder, _KIND)
        self._name = digest(self._facts())
        self._read()

    @property
    def has_samples(self) -> bool:
        """Whether anything is known yet."""
        return bool(self._samples)

    @property
    def note(self) -> str | None:
        """What was wrong with the file on disk, if anything was."""
        return None if self._cache is None else self._cache.note

    def sample(self, shape: CacheShape) -> CacheSample:
        """Of one shape."""
        if shape not in self._samples:
            self._samples[shape] = self._sample(shape) if self._is_slots else self._static_sample(shape)
        return self._samples[shape]

    def overhead_bytes(self, shapes: Sequence[CacheShape]) -> int:
        """What must be free beyond what is allocated, so that a job passes through these shapes. 0 on a CPU.

        shapes: all with the cache of the first one. See planning/overhead.py.
        """
        if self.device.is_cpu:
            return 0
        key = " ".join("x".join(map(str, asdict(shape).values())) for shape in shapes) + f" {self.settings}"
        if key not in self._overheads_bytes:
            stream = self._job(shapes)
            peak_bytes = int(live_bytes(stream, self.device, self.settings).max())
            capacity_bytes = least_capacity(stream, self.settings, peak_bytes=peak_bytes)
            self._overheads_bytes[key] = capacity_bytes - peak_bytes
        return self._overheads_bytes[key]

    def save(self) -> None:
        """Keep on disk what was found; what another run has found meanwhile stays."""
        if self._cache is None or not self.num_traced:
            return
        self._read()
        self._cache.write(
            self._name,
            {
                "samples": [_as_json(sample) for sample in self._samples.values()],
                "overheads_bytes": self._overheads_bytes,
            },
        )

    def _sample(self, shape: CacheShape) -> CacheSample:
        recording = self._recording(shape)
        stream = compose_parts(recording, ["load", FILL, PREFILL, DECODE])
        stream = as_on_device(stream, recording, self._workload, self.device)
        live = live_bytes(stream, self.device, self.settings)
        starts = {label: position for position, label in stream.marks}
        held_bytes = int(live[starts[PREFILL] - 1])
        return CacheSample(
            shape=shape,
            loaded_bytes=int(live[starts[FILL] - 1]),
            load_peak_bytes=int(live[: starts[FILL]].max()),
            held_bytes=held_bytes,
            prefill_bytes=int(live[starts[PREFILL] : starts[DECODE]].max()) - held_bytes,
            step_bytes=int(live[starts[DECODE] : starts["end"]].max()) - held_bytes,
            prefill_work=recording.work[PREFILL],
            step_work=recording.work[DECODE],
        )

    def _static_sample(self, shape: CacheShape) -> CacheSample:
        stream, recording = self._static_stream(shape)
        live = live_bytes(stream, self.device, self.settings)
        starts = {label: position for position, label in stream.marks}
        loaded_bytes = int(live[starts["prefill"] - 1])
        last = next(part for part in reversed(recording.parts) if part.split(" ")[0] in ("prefill", DECODE))
        return CacheSample(
            shape=shape,
            loaded_bytes=loaded_bytes,
            load_peak_bytes=int(live[: starts["prefill"]].max()),
            held_bytes=loaded_bytes,
            prefill_bytes=0,
            step_bytes=int(live[starts["prefill"] :].max()) - loaded_bytes,
            prefill_work=recording.work["prefill"],
            step_work=recording.work[last],
        )

    def _static_stream(self, shape: CacheShape) -> tuple[EventStream, Recording]:
        self.num_traced += 1
        new_tokens = shape.columns - shape.prompt_tokens
        with undisturbed():
            stream, recording = static_stream(self._workload, shape.rows, shape.prompt_tokens, new_tokens=new_tokens)
        return as_on_device(stream, recording, self._workload, self.device), recording

    def _job(self, shapes: Sequence[CacheShape]) -> EventStream:
        if not self._is_slots:
            return self._static_stream(shapes[0])[0]
        recordings = [self._recording(shape) for shape in shapes]
        return as_on_device(_job(recordings), recordings[0], self._workload, self.device)

    def _recording(self, shape: CacheShape) -> Recording:
        if shape not in self._recordings:
            self.num_traced += 1
            with undisturbed():
                found = record(self._workload.slots(shape), rows=shape.rows, tokens=shape.columns)
            while len(self._recordings) >= _KEPT_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[shape] = found
        return self._recordings[shape]

    def _facts(self) -> dict[str, object]:
        is_cpu = self.device.is_cpu
        return {
            **self._workload.facts,
            "generation": self._workload.generation_settings,
            "is_slots": self._is_slots,
            "device": None if is_cpu else (self.device.capability, self.device.memory_bytes),
            "rounding": None if is_cpu else self.settings.roundup_power2_divisions,
            "engine": source_digest(("infer",)),
            "versions": versions(),
        }

    def _read(self) -> None:
        saved = None if self._cache is None else self._cache.read(self._name)
        if self._cache is None or saved is None:
            return
        try:
            samples = [_parsed(each) for each in saved["samples"]]
            overheads = {str(key): int(value) for key, value in saved["overheads_bytes"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError):
            self._cache.refuse(self._name)
            return
        self._samples = {**{sample.shape: sample for sample in samples}, **self._samples}
        self._overheads_bytes = {**overheads, **self._overheads_bytes}


def _job(recordings: Sequence[Recording]) -> EventStream:
    """The load and the cache, then prompts and a step of each recording, from the first to the last and again."""
    stream = EventStream()
    first = recordings[0]
    held: Binding = {}
    play(stream, first.stream, first.parts["load"], held, label="load")
    play(stream, first.stream, first.parts[FILL], held, label=FILL)
    for recording in [*recordings] * _TIMES:
        for part in (PREFILL, DECODE):
            stream.mark(part)
            _play_alone(stream, recording, part)
    stream.mark("end")
    return stream


def _play_alone(stream: EventStream, recording: Recording, part: str) -> None:
    """A part that leaves nothing; what it ends of earlier parts is another recording's."""
    recorded, own = recording.stream, {}
    for position in range(*recording.parts[part]):
        storage, place = recorded.storages[position], recorded.places[position]
        if storage >= 0:
            own[storage] = stream.birth(recorded.sizes[storage], recorded.categories[storage], place)
        elif ~storage in own:
            stream.death(own.pop(~storage), place)
    for storage in own.values():
        stream.death(storage, stream.places[-1])


def _as_json(sample: CacheSample) -> dict[str, Any]:
    return {
        "shape": asdict(sample.shape),
        **{name: getattr(sample, name) for name in _BYTES},
        "prefill_work": places_as_json(sample.prefill_work),
        "step_work": places_as_json(sample.step_work),
    }


_BYTES = ("loaded_bytes", "load_peak_bytes", "held_bytes", "prefill_bytes", "step_bytes")


def _parsed(saved: Mapping[str, Any]) -> CacheSample:
    return CacheSample(
        shape=CacheShape(**{name: int(value) for name, value in saved["shape"].items()}),
        **{name: int(saved[name]) for name in _BYTES},
        prefill_work=work_from_json(saved["prefill_work"]),
        step_work=work_from_json(saved["step_work"]),
    )
