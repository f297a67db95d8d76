"""Predict what generation costs in memory and time: by traces, or in closed form for a short job.

Each shape is traced at most once: peaks, kernels and streams; a few traces give the costs of every shape that a plan
may ask for. The time of a pass is its counted work divided by the device's figures. In closed form, what fits by the
bound fits, and the bound wastes memory (see planning/costs/forward.py). As many tokens of prompts pass together as
pay, and few enough that memory is left for rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Surface
from brim.config.schema import Config, GenerationConfig
from brim.errors import ModelError
from brim.infer.engines import CacheCosts, CacheShape
from brim.memory import ConfigWorkload, Device, DeviceSpeed, static_stream
from brim.memory.allocator import AllocatorSettings
from brim.memory.closed_form import Architecture, Settings, read_architecture, settings_of
from brim.memory.trace import (
    DECODE,
    FILL,
    PREFILL,
    Binding,
    EventStream,
    Recording,
    WorkCount,
    compose_parts,
    play,
    record,
)
from brim.planning.costs.forward import bytes_of_token, bytes_of_token_in_layers
from brim.planning.costs.sampling import round_length, round_rows, through
from brim.planning.costs.time import WorkLaw, law_through, roofline
from brim.planning.costs.traces import (
    as_on_device,
    least_capacity,
    live_bytes,
    places_as_json,
    undisturbed,
    versions,
    work_from_json,
)
from brim.storage import Cache, digest, source_digest
from brim.units import format_bytes

_Point: TypeAlias = tuple[int, int]  # N, bytes


_LENGTH_STEP = 64  # prompts' lengths are rounded up to it, so that other data of the same kind meets the same samples


_SHARE_OF_SHORT_PROMPTS = 10  # percent


_MUCH_SHORTER = 0.75  # of the longest prompt; below it a length gets samples of its own


_PASS_TOKENS = 1024  # of a pass over several prompts; more make none faster: see `prefill_tokens`


# Some kernels are for few rows alone: bitsandbytes' product of a vector, up to 4 rows.
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRegion:
    """The shapes that a plan may ask for."""

    longest: int  # tokens of a prompt
    short: int  # tokens of the shortest prompts that matter
    shortest: int
    response_columns: int
    most_rows: int
    cap_bytes: int
    passes_alone: bool  # whether a pass may read some of the prompts; else all rows' are read together


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel:
    """Of one configuration on one device."""

    costs: CacheCosts  # every prompt passes alone, until somebody says how many tokens pass together
    load_peak_bytes: int
    prefill_law: WorkLaw  # N tokens of prompts of T
    step_law: WorkLaw  # N rows of T columns


def cache_region(
    lengths: ArrayLike,
    *,
    max_new_tokens: int,
    most_rows: int,
    cap_bytes: int,
    context: int | None,
    is_slots: bool = True,
) -> CacheRegion:
    """lengths: tokens of the prompts. context: tokens that the model takes at most.

    is_slots: brim's own engine, which reads prompts pass by pass and does not keep the last token.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    longest = int(tokens.max())
    rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    if context is not None:
        rounded = max(min(rounded, context - max_new_tokens), longest)
    short = round_length(int(np.percentile(tokens, _SHARE_OF_SHORT_PROMPTS, method="inverted_cdf")))
    return CacheRegion(
        longest=rounded,
        short=short if short <= _MUCH_SHORTER * rounded else rounded,
        shortest=int(tokens.min()),
        response_columns=max_new_tokens - 1 if is_slots else max_new_tokens,
        most_rows=max(2, most_rows),
        cap_bytes=cap_bytes,
        passes_alone=is_slots,
    )


def cache_model(sample: Callable[[CacheShape], CacheSample], where: CacheRegion) -> CacheModel:
    """sample: what costs time. Two samples, or four where prompts differ much in length."""
    first = sample(_shape(where, where.longest, rows=2, prompts=1))
    many = _most_rows(first, where)
    lines = [
        [
            sample(_shape(where, tokens, rows=min(_FEW_ROWS, max(many // 2, 1)), prompts=1)),
            sample(_shape(where, tokens, rows=many, prompts=min(max(2, -(-_PASS_TOKENS // tokens)), many))),
        ]
        for tokens in sorted({where.short, where.longest})
    ]
    samples = [each for line in lines for each in line]
    static_bytes, cell_bytes = _held(samples)
    costs = CacheCosts(
        static_bytes=static_bytes,
        cell_bytes=cell_bytes,
        prefill=_surface(
            [line[0].shape.prompt_tokens for line in lines], [[*map(_of_prefill, line)] for line in lines]
        ),
        step=_surface([line[0].shape.columns for line in lines], [[*map(_of_step, line)] for line in lines]),
        prefill_tokens=1,
        response_columns=where.response_columns,
        shortest_tokens=where.shortest,
    )
    return CacheModel(
        costs=costs,
        load_peak_bytes=max(each.load_peak_bytes for each in samples),
        prefill_law=law_through([(_of_prefill(s)[0], s.shape.prompt_tokens, s.prefill_work) for s in samples]),
        step_law=law_through([(s.shape.rows, s.shape.columns, s.step_work) for s in samples]),
    )


def verified_cache_costs(costs: CacheCosts, sample: CacheSample) -> CacheCosts:
    """The costs after one more trace: exact there."""
    return replace(
        costs,
        prefill=through(costs.prefill, _of_prefill(sample)[0], sample.shape.prompt_tokens, sample.prefill_bytes),
        step=through(costs.step, sample.shape.rows, sample.shape.columns, sample.step_bytes),
    )


def _shape(where: CacheRegion, tokens: int, *, rows: int, prompts: int) -> CacheShape:
    rows = max(rows, prompts)
    return CacheShape(
        rows=rows,
        columns=tokens + where.response_columns,
        prompts=prompts if where.passes_alone else rows,
        prompt_tokens=tokens,
    )


def _most_rows(first: CacheSample, where: CacheRegion) -> int:
    """Of the shortest columns that matter, as many as the cap has room for by the cache alone; at least 2."""
    cells = first.shape.rows * first.shape.columns
    held_bytes = first.held_bytes - first.loaded_bytes
    cell_bytes = (held_bytes or first.step_bytes) / cells
    room_bytes = max(where.cap_bytes - first.loaded_bytes, 0)
    rows = int(room_bytes / cell_bytes) // (where.short + where.response_columns) + 1
    return min(max(round_rows(rows), 2), where.most_rows)


def _held(samples: Sequence[CacheSample]) -> tuple[int, float]:
    """What lives between passes: bytes whatever the shape, and for each row and column of the cache."""
    ordered = sorted(samples, key=lambda each: each.shape.rows * each.shape.columns)
    least, most = ordered[0], ordered[-1]
    cells = [each.shape.rows * each.shape.columns for each in (least, most)]
    if cells[0] == cells[1]:
        return least.loaded_bytes, (least.held_bytes - least.loaded_bytes) / cells[0]
    cell_bytes = (most.held_bytes - least.held_bytes) / (cells[1] - cells[0])
    return round(least.held_bytes - cell_bytes * cells[0]), cell_bytes


def _of_prefill(sample: CacheSample) -> _Point:
    return sample.shape.prompts * sample.shape.prompt_tokens, sample.prefill_bytes


def _of_step(sample: CacheSample) -> _Point:
    return sample.shape.rows, sample.step_bytes


def _surface(lengths: Sequence[int], lines: Sequence[Sequence[_Point]]) -> Surface:
    """Through lines in the order of their lengths. Before its first point a line is no lower than the shortest's."""
    ordered = [sorted(dict(line).items()) for line in lines]
    return Surface(
        base=float(ordered[0][0][1]),
        lengths=tuple(lengths),
        tokens=tuple(tuple(number for number, _ in line) for line in ordered),
        values=tuple(tuple(np.maximum.accumulate([float(value) for _, value in line]).tolist()) for line in ordered),
    )


_NUMBERS = (1, 2**20)  # of tokens of prompts, or of rows: bytes lie on a line


# Of a score while a token is drawn: fp32 three times (scaled, narrowed, probabilities), and fp64 sums.
_BYTES_OF_SCORE = 3 * 4 + 2 * 8


_COPIES = 4  # of a layer's keys and values, one for each head that asks: as they are, and as a kernel wants them


# transformers' `generate` keeps more of them: narrowed, as logarithms, added to what a beam has, and sorted.
_BYTES_OF_SCORE_IN_GENERATE = 2 * _BYTES_OF_SCORE


_BYTES_OF_WRITTEN_TOKEN = 128  # sequences of beams, finished and not, their copies and whose successors they are


_BYTES_OF_MASKED = 8  # of a query and a key: whether it sees it, and the same as a number that is added


_KERNELS_A_LAYER = 45  # of a Llama in transformers 5, with a cache


_TIMES_THROUGH_CACHE = 5  # a step of `generate` copies it for a token more and for the beams that go on, and reads it


# A matrix's product with few rows reads the matrix; half of the parameters' bytes more are read and written beside it.
_TRAFFIC = 1.5


def closed_cache_costs(
    config: Config,
    base_config: Mapping[str, Any],
    lengths: ArrayLike,
    *,
    static_bytes: int,
    prefill_tokens: int,
    is_slots: bool = True,
) -> CacheCosts | None:
    """None for an architecture whose parts are not known.

    config: resolved. base_config: the base model's config.json. static_bytes: of the weights. is_slots: with brim's own
    engine; else with transformers' `generate`, which holds nothing between batches and counts in prompts with all
    their beams.
    """
    known = _known(base_config)
    new_tokens = config.generation.max_new_tokens
    assert new_tokens is not None, "resolved before"
    if known is None:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    ends = sorted({int(tokens.min()), int(tokens.max())})
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=max(ends[-1], 2))
    if not is_slots:
        return CacheCosts(
            static_bytes=static_bytes,
            cell_bytes=0.0,
            prefill=_lines(ends, [0.0] * len(ends)),
            step=_lines(
                [length + new_tokens for length in ends],
                [_generate_bytes(known, settings, config.generation, length) for length in ends],
            ),
            prefill_tokens=prefill_tokens,
            response_columns=new_tokens,
            shortest_tokens=ends[0],
        )
    columns = [length + new_tokens - 1 for length in ends]
    return CacheCosts(
        static_bytes=static_bytes,
        cell_bytes=float(known.layers * _cell_bytes_of_layer(known, settings)),
        prefill=_lines(ends, [_prefill_bytes(known, settings, length) for length in ends]),
        step=_lines(columns, [_step_bytes(known, settings, each) for each in columns]),
        prefill_tokens=prefill_tokens,
        response_columns=new_tokens - 1,
        shortest_tokens=ends[0],
    )


def closed_seconds(
    config: Config,
    base_config: Mapping[str, Any],
    lengths: ArrayLike,
    costs: CacheCosts,
    speed: DeviceSpeed,
    *,
    rows: int,
    dtype: str,
    is_slots: bool = True,
) -> float | None:
    """Where so many rows run together and every response is as long as it may be."""
    known = _known(base_config)
    if known is None:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    parameters = sum(known.parameters().values())
    a_token_s = 2 * parameters / speed.flops_per_s("matrix", dtype)
    steps = -(-len(tokens) // rows) * costs.response_columns
    columns = int(tokens.max()) + costs.response_columns
    cell_bytes, copies = costs.cell_bytes, 1
    if not is_slots:
        settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=columns)
        copies = _copies_of_row(config.generation)
        cell_bytes = _TIMES_THROUGH_CACHE * copies * known.layers * _cell_bytes_of_layer(known, settings)
    traffic_s = (_TRAFFIC * costs.static_bytes + rows * columns * cell_bytes) / speed.bytes_per_s
    host_s = known.layers * _KERNELS_A_LAYER * speed.host_s_per_kernel
    tokens_a_step = rows * copies
    if not is_slots and not config.generation.use_cache:
        tokens_a_step *= columns
    device_s = max(tokens_a_step * a_token_s, traffic_s)
    a_step_s = max(device_s, host_s) if speed.is_asynchronous else device_s + host_s
    return float(tokens.sum()) * copies * a_token_s + steps * a_step_s


def _known(base_config: Mapping[str, Any]) -> Architecture | None:
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    return architecture if architecture.is_known else None


def _cell_bytes_of_layer(architecture: Architecture, settings: Settings) -> int:
    return 2 * architecture.kv_heads * architecture.head_dim * settings.arithmetic.compute_bytes


def _prefill_bytes(architecture: Architecture, settings: Settings, length: int) -> float:
    """Of a token; scores are of the last one of a prompt alone, and of a prompt of one token of each."""
    return float(bytes_of_token(architecture, settings, length) + architecture.vocabulary * _BYTES_OF_SCORE)


def _step_bytes(architecture: Architecture, settings: Settings, columns: int) -> float:
    """Of a row."""
    groups = max(architecture.heads // max(architecture.kv_heads, 1), 1)
    copies = _COPIES * groups * columns * _cell_bytes_of_layer(architecture, settings)
    return bytes_of_token(architecture, settings, columns) + architecture.vocabulary * _BYTES_OF_SCORE + copies


def _generate_bytes(architecture: Architecture, settings: Settings, generation: GenerationConfig, length: int) -> float:
    """Of a prompt with all its beams, at the end of the longest response or while the prompt is read.

    All prompts of a batch are read together, each as often as it has beams; without a cache, all tokens at each step.
    """
    assert generation.max_new_tokens is not None, "resolved before"
    columns = length + generation.max_new_tokens
    read = length if generation.use_cache else columns
    groups = max(architecture.heads // max(architecture.kv_heads, 1), 1)
    cell_bytes = _cell_bytes_of_layer(architecture, settings)
    cache = (architecture.layers + _COPIES * groups) * columns * cell_bytes
    reading = read * (bytes_of_token_in_layers(architecture, settings, read) + read * _BYTES_OF_MASKED)
    writing = bytes_of_token_in_layers(architecture, settings, columns)
    of_each = cache + max(reading, writing) + columns * _BYTES_OF_WRITTEN_TOKEN
    of_each += architecture.vocabulary * _BYTES_OF_SCORE_IN_GENERATE  # of the last token: a model keeps no others
    return float(_copies_of_row(generation) * of_each)


def _copies_of_row(generation: GenerationConfig) -> int:
    """That are in a pass: one for each beam, and as many again for guidance, whose pass has a cache of its own."""
    return generation.num_beams * (1 if generation.guidance_scale is None else 2)


def _lines(lengths: list[int], bytes_of_one: list[float]) -> Surface:
    """In proportion to their number."""
    return Surface(
        base=0.0,
        lengths=tuple(lengths),
        tokens=(_NUMBERS,) * len(lengths),
        values=tuple(tuple(each * number for number in _NUMBERS) for each in bytes_of_one),
    )


_SHARE = 0.1  # of what there is beside the weights: what prompts' passes take, no cache can have


_LEAST = 64  # tokens; below it a pass takes as long as one of so many on any device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTokens:
    """A number and its reason."""

    tokens: int
    reason: str


def prefill_tokens(costs: CacheCosts, times: PassTimes, *, cap_bytes: int, longest: int, usual: int) -> PrefillTokens:
    """longest, usual: tokens of a prompt. A prompt that is longer than the number passes alone."""
    pays = times.tokens_that_pay(usual)
    room_bytes = _SHARE * max(cap_bytes - costs.static_bytes, 0)
    tokens = pays
    while tokens > max(_LEAST, longest) and _bytes(costs, tokens, longest) > room_bytes:
        tokens //= 2
    if tokens < pays:
        taken = f"passes over prompts take no more than {_SHARE:.0%} of the memory beside the weights"
        return PrefillTokens(tokens=tokens, reason=f"{taken}, {format_bytes(round(room_bytes))}")
    return PrefillTokens(tokens=tokens, reason="larger passes read prompts hardly faster")


def _bytes(costs: CacheCosts, tokens: int, longest: int) -> float:
    length = min(tokens, longest)
    return costs.scale * float(costs.prefill(max(tokens // length, 1), length))


WORTH = 0.02  # of the time of a row's token; rows that save less only make the last ones wait for each other


_PASSES = tuple(2**power for power in range(6, 13))  # tokens of a pass over prompts that are compared


_GAIN = 0.1  # of the time of a token; larger passes that save less are not worth theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds."""

    prefill: WorkLaw
    step: WorkLaw
    speed: DeviceSpeed

    def prefill_s(self, tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Of passes over so many tokens, of prompts of this length."""
        return roofline(self.prefill, self.speed, tokens, length).total_s

    def step_s(self, rows: ArrayLike, columns: ArrayLike) -> NDArray[np.float64]:
        """Of a token of every row."""
        return roofline(self.step, self.speed, rows, columns).total_s

    def rows_that_pay(self, columns: int, *, most: int) -> int:
        """The fewest rows with which a row's token takes hardly longer than with all of them."""
        rows = np.arange(1, most + 1)
        a_row_s = self.step_s(rows, columns) / rows
        return int(rows[np.flatnonzero(a_row_s <= (1 + WORTH) * a_row_s.min())[0]])

    def tokens_that_pay(self, length: int) -> int:
        """Tokens of a pass over prompts from which on a larger one is hardly faster."""
        tokens = np.array(_PASSES)
        a_token_s = self.prefill_s(tokens, length) / tokens
        return int(tokens[np.flatnonzero(a_token_s <= (1 + _GAIN) * a_token_s.min())[0]])


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

        shapes: all with the cache of the first one. See planning/costs/traces.py.
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
