"""One micro-batch of a workload, recorded on few layers and expanded to all of them."""

from __future__ import annotations

from dataclasses import dataclass
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.categories import categorize
from brim.memory.events import EventStream
from brim.memory.fake_model import build_fake, decoder_layers, depth_of_architecture, with_layers
from brim.memory.layers import Depth, Expansion, NotUniformError, expand
from brim.memory.recorder import Recorder
from brim.memory.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeight:
    """A weight that learns, and where it is in the recorded stream."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: int  # storages
    gradient: int | None  # None: no gradient reaches it


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A stream in parts: "load", then "first" and "next", micro-batches without and with gradients at hand.

    Without training, the part after "load" is "run".
    """

    stream: EventStream
    parts: dict[str, tuple[int, int]]  # events from, to
    trained: tuple[TrainedWeight, ...]


def record(workload: Workload, *, rows: int, tokens: int) -> Recording:
    """What `rows` × `tokens` do to memory."""
    depth = depth_of_architecture(workload.architecture)
    try:
        return _record(workload, depth, rows=rows, tokens=tokens)
    except NotUniformError:
        whole = Depth(num_layers=depth.num_layers, head=depth.num_layers, period=1, tail=0)
        return _record(workload, whole, rows=rows, tokens=tokens)


def _record(workload: Workload, depth: Depth, *, rows: int, tokens: int) -> Recording:
    mode = FakeTensorMode()
    model = build_fake(with_layers(workload.architecture, depth.recorded), workload.build, mode)
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
    parts = {label: (start, end) for (start, label), (end, _) in zip(marks, marks[1:], strict=False)}
    return Recording(stream=expansion.stream, parts=parts, trained=trained)


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
    recorder.phase = workload.run_phase
    recorder.stream.mark("run")
    workload.run(model, workload.batch(rows, tokens))


def _trained_weights(
    recorder: Recorder, model: nn.Module, depth: Depth, path: str, expansion: Expansion
) -> tuple[TrainedWeight, ...]:
    """In the order of the model's modules, all layers."""
    recorded: dict[str, list[tuple[str, nn.Parameter]]] = {}
    outside: list[tuple[str, nn.Parameter]] = []
    before: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(f"{path}."):
            number = name[len(path) + 1 :].split(".", 1)[0]
            recorded.setdefault(number, []).append((name, parameter))
        else:
            (outside if recorded else before).append((name, parameter))
    weights = [_trained(recorder, name, parameter, None, expansion) for name, parameter in before]
    for layer in range(depth.num_layers):
        template = str(depth.template(layer))
        for name, parameter in recorded.get(template, []):
            own = name.replace(f"{path}.{template}.", f"{path}.{layer}.", 1)
            weights.append(_trained(recorder, own, parameter, layer, expansion))
    weights.extend(_trained(recorder, name, parameter, None, expansion) for name, parameter in outside)
    return tuple(weights)


def _trained(
    recorder: Recorder, name: str, parameter: nn.Parameter, layer: int | None, expansion: Expansion
) -> TrainedWeight:
    weight = recorder.number_of(parameter)
    gradient = None if parameter.grad is None else recorder.number_of(parameter.grad)
    assert weight is not None
    return TrainedWeight(
        name=name,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        weight=expansion.number(weight, layer),
        gradient=None if gradient is None else expansion.number(gradient, layer),
    )
