"""Predict what forward passes without gradients cost: by traces, or in closed form for a short job.

Traces are of rows with answers, each shape at most once; a few of them give the costs of every shape that rows can
make. The closed form gives what scoring takes at most, and about how long: enough for a job that is shorter than
tracing. Its bound is several times what the closed form of `brim memory --explain` counts, so a batch that fits by it
fits; it wastes memory, and so it is not used where the time that memory saves is worth a few traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Costs, Surface
from brim.config.schema import Config
from brim.errors import ModelError
from brim.memory import ConfigWorkload, Device, DeviceSpeed
from brim.memory.allocator import AllocatorSettings
from brim.memory.closed_form import Architecture, Settings, kept_in_a_layer, read_architecture, settings_of
from brim.memory.trace import Binding, EventStream, Place, Recording, WorkCount, compose_parts, play, record
from brim.models import chunk_rows, fullest_chunks
from brim.planning.costs.sampling import LEAST_TOKENS, Region, Sample, Shape, passing, region, sampled
from brim.planning.costs.time import TimeEstimate, estimate, roofline, shapes_to_count
from brim.planning.costs.traces import (
    Basics,
    KnownShapes,
    ShapeCache,
    as_on_device,
    least_capacity,
    live_bytes,
    most_demanding,
    undisturbed,
)

# A layer's pass keeps less than what it would keep for a backward pass, but has temporary tensors: tests compare the
# bound with traces of each family.
_TIMES_A_LAYER = 4


_FP32_BYTES = 4


_KERNELS_A_LAYER = 40  # of a Llama in transformers 5


# No batch is looked at that has more tokens; any model that is worth a GPU is bound by arithmetic long before.
MOST_TOKENS = 2**18


_TOKENS = tuple(2**power for power in range(3, 1 + MOST_TOKENS.bit_length() - 1))


_DTYPES = {"fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def closed_costs(
    config: Config, base_config: Mapping[str, Any], lengths: ArrayLike, *, static_bytes: int, speed: DeviceSpeed
) -> Costs | None:
    """None for an architecture whose parts are not known.

    config: resolved. base_config: the base model's config.json. static_bytes: of the weights, and what is beside them.
    """
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    if not architecture.is_known:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    ends = tuple(sorted({int(tokens.min()), int(tokens.max())}))
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=ends[-1])
    numbers = np.array(_TOKENS, dtype=np.float64)
    dtype = _DTYPES.get(str(config.precision), "float32")
    peaks = [static_bytes + bytes_of_token(architecture, settings, length) * numbers for length in ends]
    times = [_seconds(architecture, numbers, length, speed, dtype) for length in ends]
    return Costs(
        peak=_surface(ends, peaks, base=static_bytes),
        static_bytes=static_bytes,
        time=_surface(ends, times, base=float(_seconds(architecture, np.zeros(1), ends[0], speed, dtype)[0])),
    )


def weight_bytes(config: Config, base_config: Mapping[str, Any]) -> int | None:
    """Of a model that is not loaded; None where its parts are not known."""
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=2)
    return sum(architecture.parameters().values()) * settings.weights.element_bytes


def bytes_of_token(architecture: Architecture, settings: Settings, length: int) -> int:
    """What a token adds at most, in rows of this length, with all logits at once."""
    # As they come, the supervised ones of them, in fp32, and their logarithms.
    of_logits = architecture.vocabulary * 2 * (settings.arithmetic.compute_bytes + _FP32_BYTES)
    return bytes_of_token_in_layers(architecture, settings, length) + of_logits


def bytes_of_token_in_layers(architecture: Architecture, settings: Settings, length: int) -> int:
    """The same without logits."""
    parts = kept_in_a_layer(
        architecture,
        settings.arithmetic,
        lora=settings.lora,
        attention=settings.attention,
        sequence_length=length,
    )
    return _TIMES_A_LAYER * sum(part.bytes_per_token for part in parts)


def _seconds(
    architecture: Architecture, tokens: NDArray[np.float64], length: int, speed: DeviceSpeed, dtype: str
) -> NDArray[np.float64]:
    """FLOPs and kernels alone."""
    a_layer = sum(
        each.inputs * each.outputs * (architecture.experts_per_token if each.copies > 1 else 1)
        for each in architecture.linears
    )
    flops = 2 * (architecture.layers * a_layer + architecture.vocabulary * architecture.hidden)
    scores = 2 * architecture.layers * architecture.heads * architecture.head_dim * length  # causal: half of them
    device = tokens * (flops / speed.flops_per_s("matrix", dtype) + scores / speed.flops_per_s("attention", dtype))
    host = np.full(len(tokens), architecture.layers * _KERNELS_A_LAYER * speed.host_s_per_kernel)
    return np.asarray(np.maximum(device, host) if speed.is_asynchronous else device + host)


def _surface(lengths: tuple[int, ...], lines: list[NDArray[np.float64]], *, base: float) -> Surface:
    return Surface(
        base=base,
        lengths=lengths,
        tokens=(_TOKENS,) * len(lengths),
        values=tuple(tuple(line.tolist()) for line in lines),
    )


_LEAST_TOKENS = 8  # below it a batch's time does not depend on them


# Tokens of a batch with which a GPU is busy whatever the model: an A100 reaches 90% of its speed at about 1,000, with
# weights in 4 bits at 4,000. The law of the kernels' work does not know that small products are slower.
_BUSY_TOKENS = 16_384


_STEPS_OF_TWO = 4  # to which a cap is rounded up, so that one that is a little different meets the same samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardModel:
    """Costs, and beyond which batches nothing gets better."""

    costs: Costs
    useful_tokens: int
    load_bytes: int  # peak of the load of the weights


def forward_model(
    shapes: ForwardShapes, lengths: ArrayLike, *, cap_bytes: int, context_length: int | None, speed: DeviceSpeed
) -> ForwardModel:
    """The model of the shapes that these lengths give, best near the cap.

    lengths: tokens of each row. cap_bytes: what may be allocated at most. context_length: tokens that the model takes
    at most; None: no limit.
    """
    tokens = np.asarray(lengths, dtype=np.int64)

    def where(most_rows: int) -> Region:
        return region(
            tokens,
            most_rows=most_rows,
            cap_bytes=_rounded_up(cap_bytes),
            context=context_length,
            chunk_positions=shapes.basics.chunk_positions,
        )

    time = _time(shapes, tokens, longest=where(len(tokens)).longest, speed=speed)
    useful = min(_useful(time, int(np.median(tokens)), speed), max(int(tokens.sum()), _LEAST_TOKENS))
    found = ForwardModel(
        costs=Costs(
            peak=sampled(shapes.peak_bytes, where(max(1, -(-useful // int(tokens.max()))))),
            static_bytes=shapes.basics.static_bytes,
            time=time.surface,
        ),
        useful_tokens=useful,
        load_bytes=shapes.basics.load_bytes,
    )
    shapes.save()
    return found


def verified_forward(model: ForwardModel, shapes: ForwardShapes, *, rows: int, tokens: int) -> ForwardModel:
    """The model after one more trace: exact there."""
    sample = Sample(rows=rows, tokens=tokens, peak_bytes=shapes.peak_bytes(rows, tokens))
    shapes.save()
    return replace(model, costs=replace(model.costs, peak=passing(model.costs.peak, sample)))


def beside(costs: Costs, num_bytes: int) -> Costs:
    """The costs where so much is there beside the model, such as an optimizer's state."""
    peak = costs.peak
    values = tuple(tuple(value + num_bytes for value in line) for line in peak.values)
    raised = replace(peak, base=peak.base + num_bytes, values=values)
    return replace(costs, peak=raised, static_bytes=costs.static_bytes + num_bytes)


def enough_tokens(seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], speed: DeviceSpeed) -> int:
    """Of a batch: with more of them nothing gets better. seconds: of batches of so many tokens, of usual rows."""
    found = useful_tokens(seconds, least=_LEAST_TOKENS, most=MOST_TOKENS)
    return max(found, _BUSY_TOKENS) if speed.is_asynchronous else found


def _time(shapes: ForwardShapes, lengths: NDArray[np.int64], *, longest: int, speed: DeviceSpeed) -> TimeEstimate:
    short = int(np.percentile(lengths, 10, method="inverted_cdf"))
    # Of these shapes alone, so that what else has been traced meanwhile changes no plan.
    wanted = shapes_to_count((), longest=longest, short=short, most_rows=max(2, 2 * longest // short))
    return estimate(
        {shape: shapes.work(*shape) for shape in wanted},
        speed,
        longest=int(lengths.max()),
        shortest=int(lengths.min()),
        most_rows=-(-MOST_TOKENS // int(lengths.max())),
    )


def _useful(time: TimeEstimate, length: int, speed: DeviceSpeed) -> int:
    def seconds(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        return roofline(time.law, speed, tokens, length).total_s

    return enough_tokens(seconds, speed)


def _rounded_up(num_bytes: int) -> int:
    step = math.ceil(_STEPS_OF_TWO * math.log2(max(num_bytes, 2)))
    return int(2 ** (step / _STEPS_OF_TWO))


# Batches larger than those whose time for a token is so near to the least bring nothing but risk.
NEAR_LEAST_TIME = 0.01


def useful_tokens(seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], *, least: int, most: int) -> int:
    """Tokens of the smallest batch whose time for a token is near the least.

    seconds: of batches of so many tokens, of rows of a usual length. least, most: tokens to look at.
    """
    tokens = np.unique(np.geomspace(least, max(most, least), 64).round())
    per_token = seconds(tokens) / tokens
    near = per_token <= (1 + NEAR_LEAST_TIME) * per_token.min()
    return int(tokens[int(np.argmax(near))])


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

        See planning/costs/traces.py. used: (rows, tokens) of the passes.
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
