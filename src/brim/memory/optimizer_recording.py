"""What an optimizer's step does to memory, recorded over all the weights that learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from brim.memory.events import EventStream
from brim.memory.recorder import Recorder
from brim.memory.recording import TrainedWeight
from brim.memory.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecording:
    """Two updates: "first" bears the optimizer's state, "steady" finds it."""

    stream: EventStream
    parts: dict[str, tuple[int, int]]  # events from, to
    gradients: dict[str, tuple[int | None, ...]]  # by part: the storage of each weight's gradient


def record_optimizer(workload: Workload, trained: Sequence[TrainedWeight]) -> OptimizerRecording:
    """Clip, update and drop the gradients, twice."""
    assert workload.training is not None
    recorder = Recorder(temporaries=workload.temporaries)
    gradients: dict[str, tuple[int | None, ...]] = {}
    with FakeTensorMode(), recorder, workload.view(None):
        recorder.phase = "load"
        weights = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in trained]
        optimizer = workload.training.optimizer(weights)
        recorder.phase = "optimizer"
        for part in ("first", "steady"):
            gradients[part] = _give_gradients(recorder, weights, trained)
            recorder.stream.mark(part)
            workload.training.update(weights, optimizer)
            recorder.stream.mark("over")  # the next gradients are not this update's
        for state in _states(optimizer):
            recorder.categorize(state, "optimizer_state")
    stream = _without(recorder.close(), _on_the_cpu(optimizer, recorder))
    marks = stream.marks
    parts = {label: (start, end) for (start, label), (end, _) in zip(marks[::2], marks[1::2], strict=True)}
    return OptimizerRecording(stream=stream, parts=parts, gradients=gradients)


def _give_gradients(
    recorder: Recorder, weights: Sequence[nn.Parameter], trained: Sequence[TrainedWeight]
) -> tuple[int | None, ...]:
    numbers: list[int | None] = []
    for weight, each in zip(weights, trained, strict=True):
        weight.grad = None if each.gradient is None else torch.empty_like(weight)
        numbers.append(None if weight.grad is None else recorder.born(weight.grad, "gradients"))
    return tuple(numbers)


def _states(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]


def _on_the_cpu(optimizer: Optimizer, recorder: Recorder) -> set[int]:
    """The step counters, which PyTorch keeps on the CPU unless the optimizer is fused or capturable."""
    if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return set()
    steps = [state["step"] for state in optimizer.state.values() if isinstance(state.get("step"), torch.Tensor)]
    return {number for step in steps if (number := recorder.number_of(step)) is not None}


def _without(stream: EventStream, storages: set[int]) -> EventStream:
    """The stream without some storages; those that stay keep their numbers."""
    kept = [i for i, storage in enumerate(stream.storages) if (storage if storage >= 0 else ~storage) not in storages]
    before = [0] * (len(stream.storages) + 1)
    for position in kept:
        before[position + 1] = 1
    for position in range(len(stream.storages)):
        before[position + 1] += before[position]
    return EventStream(
        sizes=stream.sizes,
        categories=stream.categories,
        storages=[stream.storages[i] for i in kept],
        places=[stream.places[i] for i in kept],
        marks=[(before[position], label) for position, label in stream.marks],
    )
