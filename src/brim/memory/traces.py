"""Share traces of one configuration's phases among the devices on which they are the same.

One thread traces at a time, and what cannot be traced is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import TYPE_CHECKING, TypeAlias

import torch

from brim.config.schema import FinetuneTrainer
from brim.errors import ModelError, Problem
from brim.memory.allocator import AllocatorSettings, Replay
from brim.memory.cuda import CudaTarget
from brim.memory.devices import Device, cpu_device
from brim.memory.events import EventStream
from brim.memory.prediction import MemoryPrediction, Setting, predict, replay_unlimited
from brim.memory.trace import (
    OptimizerRecording,
    Recording,
    compose_parts,
    compose_steps,
    depth_of_architecture,
    record,
    record_optimizer,
    with_layers,
    with_workspaces,
)
from brim.memory.workload import ConfigWorkload
from brim.models import LOADING_ERRORS
from brim.models.folders import ModelFolder
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.memory.fsdp import Sharding
    from brim.memory.predict import Asked


_Updates: TypeAlias = dict[Hashable, OptimizerRecording]


LEAST_TOKENS = 2  # one token to predict the other from


_NUM_STEPS = 2  # the first allocates the optimizer's state; those after it are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Say what is predicted of a configuration, whatever the device."""

    rows: int
    tokens: int
    sharding: Sharding | None  # None: a run on one GPU, all on it
    allocator: AllocatorSettings

    @property
    def world_size(self) -> int:
        return 1 if self.sharding is None else self.sharding.world_size


@dataclass(frozen=True, slots=True)
class _Rank:
    """Hold what one rank does, and its replay with unlimited memory."""

    stream: EventStream
    cuda_streams: Sequence[int] | None  # of each storage; None: all one
    replay: Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    asked: Asked
    target: CudaTarget | None
    workload: ConfigWorkload
    stream: EventStream
    recording: Recording
    ranks: dict[Hashable, _Rank] = field(default_factory=dict)

    def serves(self, asked: Asked, target: CudaTarget | None) -> bool:
        """Return whether a trace for this device would be the same."""
        if (asked.config, asked.phase) != (self.asked.config, self.asked.phase):
            return False
        return target is self.target or (
            self.target is not None and target is not None and self.target.has_same_answers_on(target)
        )


class Traces:
    """Hold the traces of one job. Cards with the same arithmetic and kernels share a trace, and replays if possible."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._found: list[_Trace] = []
        self._updates: _Updates = {}

    def predict(self, asked: Asked, *, choices: Sequence[str] = ()) -> MemoryPrediction:
        """Predict what the phase takes on the device. choices: to be shown beside those of the model.

        Raises whatever the architecture's own code raises in a trace.
        """
        trace = self._trace(asked)
        device = asked.device
        setting = Setting(
            phase=asked.phase,
            batch_size=self.job.rows,
            sequence_length=self.job.tokens,
            world_size=self.job.world_size,
            # The CPU is described again, since more modules have been imported by now.
            device=cpu_device() if device.is_cpu else device.among(self.job.world_size),
            has_limit=asked.has_limit,
            allocator=self.job.allocator,
            choices=(*(choice.as_note() for choice in (*asked.choices, *trace.workload.choices)), *choices),
        )
        rank, host_bytes = self._rank(trace, setting), self._host_bytes(trace, device)
        if host_bytes:
            told = f"host: {format_bytes(host_bytes)} of its memory for weights, gradients and the optimizer's state"
            setting = replace(setting, choices=(*setting.choices, told))
        trainer, quantization = asked.config.trainer, asked.config.quantization
        given = isinstance(trainer, FinetuneTrainer) and trainer.enable_gradient_checkpointing
        checkpointing = given != "auto" and given  # without a plan, `auto` is off
        return replace(
            predict(rank.stream, setting, rank.replay, cuda_streams=rank.cuda_streams),
            quantization_bits=None if quantization is None else quantization.bits,
            has_chunked_loss=asked.phase != "generate" and trace.workload.has_chunked_loss,
            gradient_checkpointing=checkpointing if asked.phase == "train" else None,
            is_packed=asked.phase in ("train", "evaluate") and trainer.packing is True,
            host_bytes=host_bytes,
        )

    def build(self, asked: Asked) -> None:
        """Build the few layers that a trace of training runs, on no device. Raises as `predict` does."""
        target = CudaTarget.of(asked.device.gpu_capability)
        workload = ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target).training()
        architecture = with_layers(workload.architecture, depth_of_architecture(workload.architecture).recorded)
        with torch.device("meta"):
            workload.build(architecture)

    def _trace(self, asked: Asked) -> _Trace:
        target = CudaTarget.of(asked.device.gpu_capability)
        for trace in self._found:
            if trace.serves(asked, target):
                return trace
        workload = ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)
        stream, recording = _composed(workload, asked, self.job, self._updates)
        trace = _Trace(asked=asked, target=target, workload=workload, stream=stream, recording=recording)
        self._found.append(trace)
        return trace

    def _host_bytes(self, trace: _Trace, device: Device) -> int:
        """Return what is on the host where something is offloaded to it, and 0 elsewhere."""
        sharding = self.job.sharding
        if sharding is None or not sharding.on(device).has_host:
            return 0
        from brim.memory.fsdp import OnHost

        return OnHost.of(trace.stream, trace.recording.weights, sharding).num_bytes

    def _rank(self, trace: _Trace, setting: Setting) -> _Rank:
        """Return what a rank does on the device."""
        device, stream, recording = setting.device, trace.stream, trace.recording
        device_bytes = device.memory_bytes
        is_sharded = self.job.sharding is not None and self.job.sharding.shards
        key: Hashable = None
        if not device.is_cpu:
            warmup_bytes = trace.workload.warmup_bytes(recording, device_bytes=device_bytes, is_sharded=is_sharded)
            shares_bytes = None if setting.allocator == AllocatorSettings() else (device_bytes, setting.has_limit)
            key = (device.cublas_workspace_bytes, warmup_bytes, shares_bytes)
        if key not in trace.ranks:
            if not device.is_cpu:
                stream = trace.workload.with_loading(
                    stream, recording, device_bytes=device_bytes, is_sharded=is_sharded
                )
                stream = with_workspaces(stream, device.cublas_workspace_bytes)
            cuda_streams: Sequence[int] | None = None
            if self.job.sharding is not None:
                from brim.memory.fsdp import shard

                sharded = shard(stream, recording.weights, self.job.sharding.on(device))
                stream, cuda_streams = sharded.stream, sharded.cuda_streams
            trace.ranks[key] = _Rank(stream, cuda_streams, replay_unlimited(stream, setting, cuda_streams))
        return trace.ranks[key]


def _composed(workload: ConfigWorkload, asked: Asked, job: Job, updates: _Updates) -> tuple[EventStream, Recording]:
    """Return the stream of the phase that is asked for, and a recording that it is composed of."""
    rows, tokens = job.rows, job.tokens
    if asked.phase == "train":
        return _trained(workload, [(rows, tokens)] * _NUM_STEPS, updates)
    if asked.phase == "generate":
        from brim.infer.engines import SlotsEngine, usual_pass_tokens  # here, since training needs no engine
        from brim.memory.generation import brim_stream, static_stream

        new_tokens = asked.config.generation.max_new_tokens or 1
        if not SlotsEngine.why_not(asked.architecture, workload.generation_settings):
            usual = usual_pass_tokens(is_packed=workload.is_packed, is_cuda=workload.has_cuda)
            return brim_stream(workload.slots, rows, tokens, new_tokens=new_tokens, pass_tokens=usual)
        return static_stream(workload.generation(), rows, tokens, new_tokens=new_tokens)
    if asked.phase == "load" and isinstance(asked.config.trainer, FinetuneTrainer):
        recording = record(workload.training(), rows=1, tokens=LEAST_TOKENS)
    else:
        recording = record(workload.evaluation(), rows=rows, tokens=tokens)
    return compose_parts(recording, ["load"] if asked.phase == "load" else ["load", "evaluate"]), recording


def training_stream(workload: ConfigWorkload, shapes: Sequence[tuple[int, int]]) -> EventStream:
    """Compose the load, then a step of each shape of micro-batches, (rows, tokens)."""
    return _trained(workload, shapes, {})[0]


def _trained(
    workload: ConfigWorkload, shapes: Sequence[tuple[int, int]], updates: _Updates
) -> tuple[EventStream, Recording]:
    """Return the stream of the steps, and the recording of the first one."""
    traced = workload.training()
    recordings = {shape: record(traced, rows=shape[0], tokens=shape[1]) for shape in dict.fromkeys(shapes)}
    steps = [recordings[shape] for shape in shapes]
    first = steps[0]
    # An update depends on the weights that learn, not on the forward pass's precision or on what was recomputed.
    learning = [(each.name, each.shape, each.dtype, each.gradient is None) for each in first.trained]
    key = (first.depth, first.learning, tuple(learning), workload.has_cuda)
    if key not in updates:
        updates[key] = record_optimizer(traced, first)
    return compose_steps([[step] * workload.micro_batches for step in steps], updates[key]), first


# A trace watches all modules of the process and replaces functions of torch and transformers while it lasts.
ONE_AT_A_TIME = threading.RLock()


@contextmanager
def tracing(folder: ModelFolder) -> Iterator[None]:
    """Let one thread trace at a time. Raises UntraceableError for an architecture that cannot be traced."""
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=()):  # what is built may draw numbers, and libraries do, too
        try:
            yield
        except UNTRACEABLE as error:
            if is_a_mistake_of_brims(error):
                raise
            raise UntraceableError(untraceable(error, folder)) from error


class UntraceableError(ModelError):
    """Report that there is no prediction for this architecture, which may train all the same."""


# Raised by an architecture whose code asks for values or for something else that fake tensors do not have, and by
# transformers for a config.json that does not fit.
UNTRACEABLE = (*LOADING_ERRORS, LookupError)


def is_a_mistake_of_brims(error: Exception) -> bool:
    """Return whether an assertion of brim's own failed; torch, too, raises AssertionError, for wrong arguments."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised_in = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return isinstance(error, AssertionError) and raised_in.startswith("brim.")


def untraceable(error: Exception, folder: ModelFolder) -> Problem:
    """Say why there is no prediction for this architecture."""
    text = shorten(str(error), 300, placeholder=" …")  # torch may add a stack of its own
    return Problem(
        what=f"the architecture {folder.config.get('model_type')!r} cannot be traced: {type(error).__name__}: {text}",
        where=folder.name,
        expected="a causal language model whose tensors' shapes depend on the shape of its input alone",
        fix="check config.json; measure the run itself with `brim memory --measure`",
    )
