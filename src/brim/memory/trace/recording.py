"""Record one micro-batch of a workload on few layers, and expand it to all of them.

The parameters of all layers are listed as sharding splits them; tied ones count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.lazy import without_collector
from brim.memory.events import Depth, EventStream, Weight, WorkCount, categorize
from brim.memory.trace.layers import Expansion, decoder_layers, depth_of_architecture, expand, with_layers
from brim.memory.trace.recorder import Recorder, Workload, build_fake
from brim.memory.trace.segments import NotUniformError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeight:
    """Describe a weight that learns, and where it is in the stream of all layers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: int | None  # the gradient's storage; None: no gradient reaches the weight
    layer: int | None
    recorded: int  # position in `Recording.learning` of the weight that stands for it


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningWeight:
    """Describe a weight of the recorded layers that learns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: int | None  # recorded
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Hold a stream in parts: "load", then "first" and "next", micro-batches before and after there are gradients.

    Without training, the parts after "load" are those that the run begins.
    """

    stream: EventStream
    parts: dict[str, tuple[int, int]]  # events from, to
    trained: tuple[TrainedWeight, ...]  # of all layers, in the order of the model's modules
    learning: tuple[LearningWeight, ...]  # of the recorded layers, in that order
    depth: Depth
    layers_path: str
    weights: tuple[Weight, ...]  # all parameters of all layers, as sharding splits them
    work: Mapping[str, WorkCount]  # by part, over all layers


def record(workload: Workload, *, rows: int, tokens: int) -> Recording:
    """Record what `rows` × `tokens` do to memory."""
    depth = depth_of_architecture(workload.architecture)
    with without_collector():  # storages die when they are released, not when it runs
        try:
            return _record(workload, depth, rows=rows, tokens=tokens)
        except NotUniformError:
            return _record(workload, depth.whole(), rows=rows, tokens=tokens)


def _record(workload: Workload, depth: Depth, *, rows: int, tokens: int) -> Recording:
    mode = FakeTensorMode()
    mode.cache_enabled = False  # the recorder's own cache is faster
    model = build_fake(with_layers(workload.architecture, depth.recorded), workload.build, mode)
    with mode, Recorder(), workload.view(model):  # which remembers what operators return
        workload.settle(model)
    path, layers = decoder_layers(model, depth.num_recorded)
    recorder = Recorder(temporaries=workload.temporaries)
    recorder.know(model, layers)
    with mode, recorder, recorder.watching_modules():
        recorder.phase = "load"
        recorder.stream.mark("load")
        recorder.enter_weights(model)
        with workload.view(model):
            if workload.training is not None:
                _train(recorder, model, workload, rows, tokens)
            else:
                _run(recorder, model, workload, rows, tokens)
    recorder.stream.mark("end")
    stream = recorder.close()
    categorize(stream, body=path.rpartition(".")[0], recomputed=recorder.recomputed)
    expansion = expand(stream, depth, layers_path=path)
    trained = _trained_weights(recorder, model, depth, path, expansion)
    marks = expansion.stream.marks
    parts = {label: (start, end) for (start, label), (end, _) in pairwise(marks)}
    return Recording(
        stream=expansion.stream,
        parts=parts,
        trained=trained,
        learning=_learning_weights(model, path),
        depth=depth,
        layers_path=path,
        weights=weights_of(recorder, model, depth, path, expansion),
        work=recorder.work.over_all_layers(depth),
    )


def _train(recorder: Recorder, model: nn.Module, workload: Workload, rows: int, tokens: int) -> None:
    assert workload.training is not None
    recorder.phase = "forward"
    for part in ("first", "next") if workload.training.accumulates else ("first",):
        recorder.stream.mark(part)
        workload.training.micro_batch(model, workload.batch(rows, tokens))
        for parameter in model.parameters():
            if parameter.grad is not None:
                recorder.categorize(parameter.grad, "gradients")


def _run(recorder: Recorder, model: nn.Module, workload: Workload, rows: int, tokens: int) -> None:
    assert workload.run is not None

    def begin(label: str) -> None:
        recorder.phase = label.split(" ")[0]
        recorder.stream.mark(label)

    workload.run(model, workload.batch(rows, tokens), begin)


def _trained_weights(
    recorder: Recorder, model: nn.Module, depth: Depth, path: str, expansion: Expansion
) -> tuple[TrainedWeight, ...]:
    """List the weights that learn in the order of the modules, those of all layers in the place of the first."""
    learning = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    by_layer: dict[int | None, list[int]] = {}
    for position, (name, _) in enumerate(learning):
        by_layer.setdefault(_layer_in(name, path), []).append(position)
    first = min((positions[0] for layer, positions in by_layer.items() if layer is not None), default=len(learning))
    outside = by_layer.pop(None, [])
    order: list[tuple[int, int | None]] = [(position, None) for position in outside if position < first]
    for layer in range(depth.num_layers):
        order.extend((position, layer) for position in by_layer.get(depth.template(layer), []))
    order.extend((position, None) for position in outside if position > first)

    def trained(position: int, layer: int | None) -> TrainedWeight:
        name, parameter = learning[position]
        gradient = None if parameter.grad is None else recorder.number_of(parameter.grad)
        return TrainedWeight(
            name=name if layer is None else name.replace(f"{path}.{_layer_in(name, path)}.", f"{path}.{layer}.", 1),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            gradient=None if gradient is None else expansion.number(gradient, layer),
            layer=layer,
            recorded=position,
        )

    return tuple(trained(position, layer) for position, layer in order)


def _learning_weights(model: nn.Module, path: str) -> tuple[LearningWeight, ...]:
    return tuple(
        LearningWeight(
            shape=tuple(weight.shape),
            dtype=weight.dtype,
            layer=_layer_in(name, path),
            has_gradient=weight.grad is not None,
        )
        for name, weight in model.named_parameters()
        if weight.requires_grad
    )


def _layer_in(name: str, path: str) -> int | None:
    return int(name[len(path) + 1 :].split(".", 1)[0]) if name.startswith(f"{path}.") else None


def weights_of(
    recorder: Recorder, model: nn.Module, depth: Depth, layers_path: str, expansion: Expansion
) -> tuple[Weight, ...]:
    """List the weights in the order of their storages; tied ones count once, for the module that comes first."""
    weights = []
    for name, parameter in model.named_parameters():
        number = recorder.number_of(parameter)
        assert number is not None
        for layer in _layers_like(name, layers_path, depth):
            weights.append(
                Weight(
                    storage=expansion.number(number, layer),
                    shape=tuple(parameter.shape),
                    element_bytes=parameter.element_size(),
                    layer=layer,
                    trainable=parameter.requires_grad,
                )
            )
    return tuple(sorted(weights, key=lambda weight: weight.storage))


def _layers_like(name: str, layers_path: str, depth: Depth) -> list[int | None]:
    """Return the layers of the model that a recorded parameter stands for; None: it is outside the layers."""
    recorded = _layer_in(name, layers_path)
    return (
        [None]
        if recorded is None
        else [layer for layer in range(depth.num_layers) if depth.template(layer) == recorded]
    )
