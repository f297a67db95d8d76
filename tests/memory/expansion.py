"""The streams of a configuration's phases, made from few recorded layers or from all of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import brim.memory.predict as memory
import brim.memory.traces as memory_traces
from brim.memory import ConfigWorkload, static_stream
from brim.memory.cuda import CudaTarget
from brim.memory.trace import EventStream, compose_parts, depth_of_architecture, recording

A100 = CudaTarget(compute_capability=(8, 0))


def workload_of(config: dict[str, Any], phase: Any, *, target: CudaTarget | None = A100) -> ConfigWorkload:
    """What brim runs for a configuration."""
    asked = memory.ask(config, phase=phase, device="a100-80gb", memory_bytes=None)
    return ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)


def all_layers() -> Any:
    """A context in which every layer is recorded, and nothing is expanded."""
    return patch.object(
        recording, "depth_of_architecture", lambda architecture: depth_of_architecture(architecture).whole()
    )


def stream_of(
    config: dict[str, Any], phase: str, *, rows: int = 2, tokens: int = 8, whole: bool = False
) -> EventStream:
    """The composed stream of a phase. whole: from all layers."""
    workload = workload_of(config, phase)
    with all_layers() if whole else nullcontext():
        if phase == "train":
            return memory_traces.training_stream(workload, [(rows, tokens)] * 2)
        if phase == "evaluate":
            return compose_parts(
                recording.record(workload.evaluation(), rows=rows, tokens=tokens), ["load", "evaluate"]
            )
        new_tokens = config["generation"]["max_new_tokens"]
        return static_stream(workload, rows, tokens, new_tokens=new_tokens)[0]


def events(stream: EventStream) -> list[tuple[Any, ...]]:
    """Every event with all that is known of it: the storage's number, size and category, and the place.

    Left out are numbers that transformers wraps into tensors outside the model, on the CPU, such as the window of each
    layer of a cache.
    """
    numbers: dict[int, int] = {}
    found: list[tuple[Any, ...]] = []
    marks = dict(stream.marks)
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        if position in marks:
            found.append((marks[position],))
        which = storage if storage >= 0 else ~storage
        if storage >= 0 and not (place.operator == "aten::lift_fresh" and place.layer is None):
            numbers[storage] = len(numbers)
        if which in numbers:
            number = numbers[which] if storage >= 0 else ~numbers[which]
            found.append((number, stream.sizes[which], stream.categories[which], place))
    return found


def recorded_layers() -> Any:
    """A context that yields the numbers of layers of each recording that is made in it; several: it was refused."""
    counts: list[int] = []
    record = recording._record

    def counting(workload: Any, depth: Any, **shape: int) -> Any:
        counts.append(depth.num_recorded)
        return record(workload, depth, **shape)

    class Counting:
        def __enter__(self) -> list[int]:
            self.patched = patch.object(recording, "_record", counting)
            self.patched.start()
            return counts

        def __exit__(self, *error: object) -> None:
            self.patched.stop()

    return Counting()
