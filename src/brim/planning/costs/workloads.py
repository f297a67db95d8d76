"""Say how what brim runs is traced: a training step, a pass without gradients, a prefill with its decoding.

Each is one class: what is recorded of a shape, what a recording tells, and the stream of a job of several shapes.
What scoring costs, and how large a batch of it brings something, follows from a few traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Costs
from brim.distributed import Share
from brim.infer.engines import CacheShape
from brim.memory import ConfigWorkload
from brim.memory.devices import DeviceSpeed
from brim.memory.events import EventStream, Place
from brim.memory.fsdp import OnHost
from brim.memory.generation import DECODE, FILL, PREFILL, static_stream
from brim.memory.trace import (
    Binding,
    OptimizerRecording,
    Recording,
    compose_parts,
    compose_steps,
    play,
    record,
    record_optimizer,
)
from brim.models.loss import chunk_rows, fullest_chunks
from brim.planning.costs.sampling import LEAST_TOKENS, sampled_length, short_length
from brim.planning.costs.time import fewest_near_least, roofline
from brim.planning.costs.traces import Found, Key, Names, Traces, undisturbed
from brim.storage import source_digest

_SMALLEST = (1, LEAST_TOKENS)


_OF_PASS = ("peak", "pass")


_OF_MEMORY = ("static", "state", "saved", "unrecorded", "first_update", "update", "load", "chunk_positions", "summed")
_OF_HOST = ("host", "copied", "copied_once")


_OF_GENERATION = ("loaded", "load_peak", "held", "prefill", "step", "prefill", "step")


class TrainingSteps:
    """Trace micro-batches of a training step, beside weights, gradients and the optimizer's state.

    config: its trainer's gradient checkpointing and chunked loss are set. is_single: every step is one micro-batch, so
    that none begins beside gradients. ranks: that add up their gradients, in buckets that stand from the step's
    beginning, so that each micro-batch begins beside gradients (see distributed.Reduction).

    What is there whatever the shape: static: bytes before a micro-batch (weights, optimizer state, gradients if steps
    have several, workspaces); state: the optimizer's part of them; saved: of a checkpoint, that and the weights that
    train; unrecorded: the part that a micro-batch's own trace does not know; first_update, update: the peak of the
    optimizer's first step, in which its state is born, and of later ones; load: the peak while the weights are loaded;
    chunk_positions: of a full chunk of the loss, 0 where all logits are there at once; summed: bytes of all gradients,
    or those that a micro-batch gathers and reduces where weights are sharded. host, copied, copied_once: of what is
    offloaded, see OnHost; 0 where all is on the device.
    """

    names: tuple[Names, Names] = (
        (*_OF_MEMORY, *_OF_HOST, "update"),
        _OF_PASS,
    )

    def __init__(self, config: ConfigWorkload, *, is_single: bool = False, ranks: int = 1) -> None:
        traced = config.training()
        assert traced.training is not None
        accumulates = (traced.training.accumulates and not is_single) or ranks > 1
        self.config, self._ranks = config, ranks
        self.micro_batches = 2 if accumulates else 1
        self.facts: Mapping[str, object] = {**config.facts, "micro_batches": self.micro_batches, "ranks": ranks}
        self.traced = replace(traced, training=replace(traced.training, accumulates=accumulates))
        self._optimizer: OptimizerRecording | None = None

    def record(self, shape: Key) -> Recording:
        """Return the recording of rows × tokens."""
        rows, tokens = shape
        with fullest_chunks():
            return record(self.traced, rows=rows, tokens=tokens)

    def find(self, traces: Traces, shape: Key) -> Found:
        """Return the peak and the work of a micro-batch, forward and backward."""
        if not shape:
            return self._basics(traces)
        recording = traces.recording(shape)
        last, stream = _last_part(recording), recording.stream
        if traces.sharding is None:
            events = slice(recording.parts["first"][0], recording.parts[last][1])
        else:
            stream, parts = self._two_steps(traces, recording)
            names = ["step 2"] if self.micro_batches == 1 else ["step 2, micro-batch 1", "step 2, micro-batch 2"]
            events = slice(parts[names[0]].start, parts[names[-1]].stop)
        peak_bytes = int(traces.live_bytes(stream)[events].max())
        return Found({"peak": peak_bytes}, {"pass": recording.work[last]})

    def _two_steps(self, traces: Traces, recording: Recording) -> tuple[EventStream, dict[str, slice]]:
        """Return two steps of equal micro-batches on the device, and the events of each part."""
        stream = compose_steps([[recording] * self.micro_batches] * 2, self.optimizer(traces))
        stream = traces.on_device(stream, recording)
        return stream, {label: slice(start, end) for (start, label), (end, _) in pairwise(stream.marks)}

    def optimizer(self, traces: Traces) -> OptimizerRecording:
        """Return the recording of the optimizer's step."""
        if self._optimizer is None:
            recording = traces.recording(_SMALLEST)
            with undisturbed():
                self._optimizer = record_optimizer(self.traced, recording)
        return self._optimizer

    def job(self, traces: Traces, shapes: Sequence[Key]) -> EventStream:
        """Return a step without the shape that takes the most, then one with it, as the rows come."""
        first, *others = recordings = [traces.recording(shape) for shape in shapes]
        if self.micro_batches == 1:
            steps = [[recording] for recording in reversed(recordings)]
        else:
            steps = [others or [first] * 2, recordings if others else [first] * 2]
        return compose_steps(steps, self.optimizer(traces))

    def _basics(self, traces: Traces) -> Found:
        recording, optimizer = traces.recording(_SMALLEST), self.optimizer(traces)
        stream, parts = self._two_steps(traces, recording)
        live = traces.live_bytes(stream)
        last = ", micro-batch 2" if self.micro_batches > 1 else ""
        trained = [(each, math.prod(each.shape)) for each in recording.trained]
        weight_bytes = summed_bytes = sum(size * each.dtype.itemsize for each, size in trained)
        # Pages are the machine's memory, and no part of the plan's; a checkpoint has what is in them.
        paged_bytes = self.config.paged_bytes(size for each, size in trained if each.gradient is not None)
        beside_bytes, static_bytes = 0, int(live[parts["step 2" + last].start - 1])
        on_host, sharding = OnHost(), traces.sharding
        if sharding is not None and sharding.has_host:
            steps = compose_steps([[recording] * self.micro_batches] * 2, optimizer)
            on_host = OnHost.of(steps, recording.weights, sharding)
        if self._ranks > 1 and (sharding is None or not sharding.shards):
            unreached = (size * each.dtype.itemsize for each, size in trained if each.gradient is None)
            beside_bytes = sum(unreached) + Share.sent_bytes(self._ranks, num_parameters=len(trained))
        if sharding is not None:
            unrecorded_bytes, state_bytes = 0, static_bytes - int(live[parts["step 1" + last].start - 1])
            if sharding.shards:
                weight_bytes, paged_bytes = weight_bytes // self._ranks, paged_bytes // self._ranks
                summed_bytes = _on_the_wire(stream, parts["step 2" + last])
            else:
                state_bytes -= _workspace_bytes(stream) if self.micro_batches == 1 else 0  # born in the first step
                weight_bytes += on_host.state_bytes  # which a copy of a checkpoint has, too
        else:
            recorded = traces.live_bytes(recording.stream)[recording.parts[_last_part(recording)][0] - 1]
            unrecorded_bytes = static_bytes - int(recorded)
            state_bytes = unrecorded_bytes - _workspace_bytes(stream)
        numbers = {
            "static": static_bytes + beside_bytes,
            "state": state_bytes,
            "saved": state_bytes + paged_bytes + weight_bytes,
            "unrecorded": unrecorded_bytes + beside_bytes,
            "first_update": int(live[parts["step 1: optimizer"]].max(initial=static_bytes)) + beside_bytes,
            "update": int(live[parts["step 2: optimizer"]].max(initial=static_bytes)) + beside_bytes,
            "load": int(live[parts["load"]].max()),
            "chunk_positions": _chunk_positions(self, [weight.shape for weight in recording.trained]),
            "summed": summed_bytes,
            "host": on_host.num_bytes,
            "copied": on_host.copied_bytes,
            "copied_once": on_host.update_bytes,
        }
        return Found(numbers, {"update": optimizer.work["steady"]})


class ForwardPasses:
    """Trace passes that score rows, without gradients. Its numbers are those of `TrainingSteps` but the optimizer's."""

    names: tuple[Names, Names] = (("static", "unrecorded", "load", "chunk_positions"), _OF_PASS)

    def __init__(self, config: ConfigWorkload) -> None:
        self.config = config
        self.facts: Mapping[str, object] = {**config.facts, "phase": _PASS}
        self.traced = config.evaluation()

    def record(self, shape: Key) -> Recording:
        """Return the recording of rows × tokens."""
        rows, tokens = shape
        with fullest_chunks():
            return record(self.traced, rows=rows, tokens=tokens)

    def find(self, traces: Traces, shape: Key) -> Found:
        """Return the peak and the work of a pass."""
        recording = traces.recording(shape or _SMALLEST)
        live, (start, end) = traces.live_bytes(recording.stream), recording.parts[_PASS]
        if shape:
            return Found({"peak": int(live[start:end].max())}, {"pass": recording.work[_PASS]})
        stream = traces.on_device(compose_parts(recording, ["load", _PASS]), recording)
        begin = next(position for position, label in stream.marks if label == _PASS)
        unrecorded_bytes = _workspace_bytes(stream)
        numbers = {
            "static": int(live[start - 1]) + unrecorded_bytes,
            "unrecorded": unrecorded_bytes,
            "load": int(traces.live_bytes(stream)[:begin].max()),
            "chunk_positions": _chunk_positions(self, ()),
        }
        return Found(numbers, {})

    def job(self, traces: Traces, shapes: Sequence[Key]) -> EventStream:
        """Return the load, then one pass of each shape, twice: the second time in what the first has left."""
        recordings = [traces.recording(shape) for shape in shapes]
        stream, first = EventStream(), recordings[0]
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
            play(stream, recorded, recording.parts[_PASS], bound)
        stream.mark("end")
        return stream


class SlotsGeneration:
    """Trace passes of brim's own engine: over prompts, and over every row's last token, beside a cache that stays.

    Its numbers of a `CacheShape`: loaded: bytes of the weights; load_peak: while they are loaded; held: between passes,
    with workspaces and the cache; prefill: what the pass over the prompts adds; step: what that over the last tokens
    adds.
    """

    names: tuple[Names, Names] = ((), _OF_GENERATION)

    def __init__(self, config: ConfigWorkload) -> None:
        self.config = config
        self.facts: Mapping[str, object] = _generation_facts(config, engine="slots")

    def record(self, shape: Key) -> Recording:
        """Return the recording of a `CacheShape`."""
        of = _cache_shape(shape)
        return record(self.config.slots(of), rows=of.rows, tokens=of.columns)

    def find(self, traces: Traces, shape: Key) -> Found:
        """Return the bytes and the work of a `CacheShape`."""
        recording = traces.recording(shape)
        stream = traces.on_device(compose_parts(recording, ["load", FILL, PREFILL, DECODE]), recording)
        live, starts = traces.live_bytes(stream), {label: position for position, label in stream.marks}
        held_bytes = int(live[starts[PREFILL] - 1])
        numbers = {
            "loaded": int(live[starts[FILL] - 1]),
            "load_peak": int(live[: starts[FILL]].max()),
            "held": held_bytes,
            "prefill": int(live[starts[PREFILL] : starts[DECODE]].max()) - held_bytes,
            "step": int(live[starts[DECODE] : starts["end"]].max()) - held_bytes,
        }
        return Found(numbers, {"prefill": recording.work[PREFILL], "step": recording.work[DECODE]})

    def job(self, traces: Traces, shapes: Sequence[Key]) -> EventStream:
        """Return the load and the first shape's cache, then prompts and a step of each, to the last one and again."""
        recordings = [traces.recording(shape) for shape in shapes]
        stream, first = EventStream(), recordings[0]
        held: Binding = {}
        play(stream, first.stream, first.parts["load"], held, label="load")
        play(stream, first.stream, first.parts[FILL], held, label=FILL)
        for recording in [*recordings] * _TIMES:
            for part in (PREFILL, DECODE):
                stream.mark(part)
                _play_alone(stream, recording, part)
        stream.mark("end")
        return stream


class StaticGeneration:
    """Trace a batch of transformers' `generate`, whose cache grows with each token.

    The numbers are those of `SlotsGeneration`; all that it adds to the weights counts as the step's, nothing as held.
    """

    names: tuple[Names, Names] = ((), _OF_GENERATION)

    def __init__(self, config: ConfigWorkload) -> None:
        self.config = config
        self.facts: Mapping[str, object] = _generation_facts(config, engine="static")
        self._streams: dict[Key, EventStream] = {}  # of the few shapes that a plan asks for

    def record(self, shape: Key) -> Recording:
        """Return the recording of the prompts' length of a `CacheShape`."""
        of = _cache_shape(shape)
        new_tokens = of.columns - of.prompt_tokens
        traced = self.config.generation()
        self._streams[shape], recording = static_stream(traced, of.rows, of.prompt_tokens, new_tokens=new_tokens)
        return recording

    def find(self, traces: Traces, shape: Key) -> Found:
        """Return the bytes and the work of a `CacheShape`."""
        recording = traces.recording(shape)
        stream = traces.on_device(self._streams[shape], recording)
        live = traces.live_bytes(stream)
        start = {label: position for position, label in stream.marks}["prefill"]
        loaded_bytes = int(live[start - 1])
        last = next(part for part in reversed(recording.parts) if part.split(" ")[0] in ("prefill", DECODE))
        numbers = {
            "loaded": loaded_bytes,
            "load_peak": int(live[:start].max()),
            "held": loaded_bytes,
            "prefill": 0,
            "step": int(live[start:].max()) - loaded_bytes,
        }
        return Found(numbers, {"prefill": recording.work["prefill"], "step": recording.work[last]})

    def job(self, traces: Traces, shapes: Sequence[Key]) -> EventStream:
        """Return the batch of the first shape."""
        traces.recording(shapes[0])
        return self._streams[shapes[0]]


_PASS = "evaluate"


_TIMES = 2  # that a job's shapes are run through the allocator: what the first time leaves, the second one finds


def _last_part(recording: Recording) -> str:
    return "next" if "next" in recording.parts else "first"


def _chunk_positions(workload: TrainingSteps | ForwardPasses, trained: Sequence[tuple[int, ...]]) -> int:
    """Return the positions of a full chunk of the loss; 0 where all logits are there at once. trained: shapes."""
    if not workload.config.has_chunked_loss:
        return 0
    vocabulary = getattr(workload.traced.architecture.get_text_config(), "vocab_size", 0)
    return chunk_rows(vocabulary, head_trains=any(shape[:1] == (vocabulary,) for shape in trained))


def _workspace_bytes(stream: EventStream) -> int:
    sizes = zip(stream.sizes, stream.categories, strict=True)
    return sum(size for size, category in sizes if category == "workspace")


def _generation_facts(config: ConfigWorkload, *, engine: str) -> dict[str, object]:
    settings, code = config.generation_settings, source_digest(("infer",))
    return {**config.facts, "generation": settings, "engine": engine, "code of engines": code}


def _cache_shape(shape: Key) -> CacheShape:
    rows, columns, prompts, prompt_tokens = shape
    return CacheShape(rows=rows, columns=columns, prompts=prompts, prompt_tokens=prompt_tokens)


def _on_the_wire(stream: EventStream, events: slice) -> int:
    """Return the bytes of all that FSDP2 gathers and reduces in these events, whole, as it is in its buffers."""
    born = zip(stream.storages[events], stream.places[events], strict=True)
    sent = ("fsdp::all_gather", "fsdp::reduce_scatter_copy_in")
    return sum(stream.sizes[storage] for storage, place in born if storage >= 0 and place.operator in sent)


def _inputs(recording: Recording) -> list[tuple[int, Place]]:
    """Return the storages that are there before the pass and end with it, which are the batch, and where each ends."""
    stream, born = recording.stream, set()
    inputs = []
    for position in range(*recording.parts[_PASS]):
        storage, place = stream.storages[position], stream.places[position]
        if storage >= 0:
            born.add(storage)
        elif ~storage not in born:
            inputs.append((~storage, place))
    return inputs


def _play_alone(stream: EventStream, recording: Recording, part: str) -> None:
    """Play a part that leaves nothing; what it ends of earlier parts is another recording's."""
    recorded, own = recording.stream, {}
    for position in range(*recording.parts[part]):
        storage, place = recorded.storages[position], recorded.places[position]
        if storage >= 0:
            own[storage] = stream.birth(recorded.sizes[storage], recorded.categories[storage], place)
        elif ~storage in own:
            stream.death(own.pop(~storage), place)
    for storage in own.values():
        stream.death(storage, stream.places[-1])


# What scoring costs

# No batch is looked at that has more tokens; any model that is worth a GPU is bound by arithmetic long before.
MOST_TOKENS = 2**18


_LEAST_TOKENS = 8  # below it a batch's time does not depend on them


# With so many tokens in a batch a GPU is busy whatever the model: an A100 reaches 90% of its speed at about 1,000, with
# weights in 4 bits at 4,000. The law of the kernels' work does not know that small products are slower.
_BUSY_TOKENS = 16_384


_STEPS_OF_TWO = 4  # to which a cap is rounded up, so that one that is a little different meets the same samples


# Once the time for a token is so near to the least, larger batches only add risk.
NEAR_LEAST_TIME = 0.01


def forward_costs(
    traces: Traces, lengths: ArrayLike, *, cap_bytes: int, context_length: int | None
) -> tuple[Costs, int]:
    """Return the costs of the shapes that these lengths give, best near the cap, and the tokens of a useful batch.

    lengths: tokens of each row. cap_bytes: what may be allocated at most. context_length: tokens that the model takes
    at most; None: no limit.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    longest, usual = int(tokens.max()), int(np.median(tokens))
    rounded = sampled_length(tokens, context=context_length)
    time = traces.time(
        tokens,
        longest=rounded,
        wide=max(2, 2 * rounded // short_length(tokens)),
        most_rows=-(-MOST_TOKENS // longest),
    )
    enough = enough_tokens(lambda number: roofline(time.law, time.speed, number, usual).total_s, time.speed)
    useful = min(enough, max(int(tokens.sum()), _LEAST_TOKENS))
    peak = traces.peak_surface(
        tokens,
        most_rows=max(1, -(-useful // longest)),
        cap_bytes=_rounded_up(cap_bytes),
        context_length=context_length,
    )
    return Costs(peak=peak, static_bytes=traces.basics["static"], time=time.surface), useful


def enough_tokens(seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], speed: DeviceSpeed) -> int:
    """Return the tokens of a batch beyond which nothing gets better.

    seconds: of batches of so many tokens, of rows of a usual length.
    """
    tokens = np.unique(np.geomspace(_LEAST_TOKENS, MOST_TOKENS, 64).round())
    found = fewest_near_least(tokens, seconds(tokens), within=NEAR_LEAST_TIME)
    return max(found, _BUSY_TOKENS) if speed.is_asynchronous else found


def _rounded_up(num_bytes: int) -> int:
    step = math.ceil(_STEPS_OF_TWO * math.log2(max(num_bytes, 2)))
    return int(2 ** (step / _STEPS_OF_TWO))
