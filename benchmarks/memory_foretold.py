"""Predict what a benchmark's case takes, step by step.

`brim.predict_memory` answers for rows of one length. Here the same parts are put together for steps of any lengths,
and for a CPU, where nothing is cached: its figure is the live bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import brim
from benchmarks.memory_cases import Case
from brim.config import DeviceFacts, load_config, resolve
from brim.config.schema import Config
from brim.memory import ConfigWorkload
from brim.memory.allocator import AllocatorSettings, CachingAllocator, replay
from brim.memory.cuda import CudaTarget
from brim.memory.devices.device import cublas_workspace_bytes
from brim.memory.events import EventStream, Phase
from brim.memory.trace import compose_parts, record, with_workspaces
from brim.memory.traces import training_stream
from brim.models import read_architecture
from brim.models.folders import locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Hold the peak of one phase, or of one step of it."""

    phase: Phase
    step: int | None
    allocated_bytes: int
    reserved_bytes: int


def foretell(case: Case, base: str, device: Mapping[str, Any]) -> Sequence[Foretold]:
    """Return each step of training, or evaluation and generation. base: holds config.json. device: see memory_gpu."""
    settings = {"base_model": base, **case.settings()}
    shapes = [(case.rows, max(lengths)) for lengths in case.lengths()]
    shapes += [shapes[-1]] * (case.num_steps - len(shapes))
    if case.does == "train":
        return list(train_peaks(settings, shapes[: case.num_steps], device))
    if device["name"] == "cpu":
        return [_evaluation_on_a_cpu(settings, shapes[0])]
    return [_run(case, settings, phase, device) for phase in ("evaluate", "generate")]


def train_peaks(
    settings: Mapping[str, Any], shapes: Sequence[tuple[int, int]], device: Mapping[str, Any]
) -> Iterator[Foretold]:
    """Yield one peak for each step. settings: a configuration. shapes: (rows, tokens) of each step's micro-batches."""
    stream = training_stream(_workload(settings, device), shapes)
    marks = _steps(stream)
    if device["name"] == "cpu":
        live = live_bytes(stream)
        allocated = reserved = live
    else:
        stream = with_workspaces(stream, cublas_workspace_bytes(tuple(device["compute_capability"])))
        marks = _steps(stream)
        replayed = replay(stream, CachingAllocator(settings=AllocatorSettings.parse(device["alloc_conf"])))
        allocated, reserved = replayed.allocated_bytes, replayed.reserved_bytes
    for number, (start, end) in enumerate(marks):
        yield Foretold(
            phase="train",
            step=number + 1,
            allocated_bytes=int(allocated[start:end].max()),
            reserved_bytes=int(reserved[start:end].max()),
        )


def live_bytes(stream: EventStream) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the live bytes after each event, without any rounding."""
    storages, sizes = np.asarray(stream.storages), np.asarray(stream.sizes, dtype=np.int64)
    return np.cumsum(
        np.where(storages >= 0, sizes[np.maximum(storages, ~storages)], -sizes[np.maximum(storages, ~storages)])
    )


def _run(case: Case, settings: Mapping[str, Any], phase: Phase, device: Mapping[str, Any]) -> Foretold:
    predicted = brim.predict_memory(
        settings, batch_size=case.rows, sequence_length=case.tokens, phase=phase, device=device["name"]
    )
    return Foretold(
        phase=phase,
        step=None,
        allocated_bytes=predicted.allocated_bytes,
        reserved_bytes=predicted.reserved_bytes,
    )


def _evaluation_on_a_cpu(settings: Mapping[str, Any], shape: tuple[int, int]) -> Foretold:
    recording = record(_workload(settings, {"name": "cpu"}).evaluation(), rows=shape[0], tokens=shape[1])
    peak = int(live_bytes(compose_parts(recording, ["load", "evaluate"])).max())
    return Foretold(phase="evaluate", step=None, allocated_bytes=peak, reserved_bytes=peak)


def _workload(settings: Mapping[str, Any], device: Mapping[str, Any]) -> ConfigWorkload:
    config: Config = load_config(settings).config
    folder = locate(config.base_model, config_only=True)
    on_cpu = device["name"] == "cpu"
    facts = DeviceFacts(kind="cpu" if on_cpu else "cuda", bf16=not on_cpu)
    resolved = resolve(config, facts, context_length=folder.context_length).config
    target = None if on_cpu else CudaTarget(compute_capability=tuple(device["compute_capability"]))
    return ConfigWorkload(resolved, folder, read_architecture(folder, trust_remote_code=False), target=target)


def _steps(stream: EventStream) -> list[tuple[int, int]]:
    """Return the events of each step, over its micro-batches and its update: from, to."""
    ends = [position for position, _ in stream.marks[1:]] + [len(stream.storages)]
    found: dict[str, tuple[int, int]] = {}
    for (start, label), end in zip(stream.marks, ends, strict=True):
        step = label.split(",")[0].split(":")[0]
        if step.startswith("step") and end > start:
            found[step] = (found.get(step, (start, end))[0], end)
    return list(found.values())
