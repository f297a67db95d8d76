"""Record what an optimizer's step does to memory.

bitsandbytes' optimizers have a stand-in, whose steps allocate on fake tensors what theirs allocate on CUDA. The states
that they keep for a parameter are listed with their bytes and where they are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.config.schema import OptimizerConfig
from brim.lazy import without_collector
from brim.memory.events import Depth, EventStream, WorkCount
from brim.memory.trace.layers import Expansion, expand
from brim.memory.trace.operators import OperatorWork, operator_work
from brim.memory.trace.recorder import Recorder, Temporaries, Workload, note_kernel
from brim.memory.trace.recording import LearningWeight, Recording, TrainedWeight
from brim.memory.trace.segments import NotUniformError
from brim.train import build_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecording:
    """Hold two updates: "first" allocates the optimizer's state, "steady" finds it there."""

    stream: EventStream
    parts: dict[str, tuple[int, int]]  # events from, to
    gradients: dict[str, tuple[int | None, ...]]  # for each part, the storage of each weight's gradient
    work: Mapping[str, WorkCount]  # by part, over all layers


def record_optimizer(workload: Workload, recording: Recording) -> OptimizerRecording:
    """Clip, update and drop the gradients, twice."""
    with without_collector():
        try:
            return _record(workload, recording, recording.depth)
        except NotUniformError:
            return _record(workload, recording, recording.depth.whole())


def _record(workload: Workload, recording: Recording, depth: Depth) -> OptimizerRecording:
    assert workload.training is not None
    is_whole = depth.num_recorded == depth.num_layers
    chosen = _all_layers(recording.trained) if is_whole else recording.learning
    recorder = _LineageRecorder(temporaries=workload.temporaries, depth=depth)
    gradients: dict[str, list[int | None]] = {}
    with FakeTensorMode(), recorder, workload.view(None):
        recorder.phase = "load"
        weights = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in chosen]
        for weight, each in zip(weights, chosen, strict=True):
            recorder.assign_layer(weight, each.layer)
        optimizer = workload.training.optimizer(weights)
        recorder.phase = "optimizer"
        for part in ("first", "steady"):
            gradients[part] = _give_gradients(recorder, weights, chosen)
            recorder.stream.mark(part)
            workload.training.update(weights, optimizer)
            recorder.stream.mark("over")  # the gradients that follow are the next update's
        for state in (value for values in optimizer.state.values() for value in values.values()):
            if isinstance(state, Tensor):
                recorder.categorize(state, "optimizer_state")
        recorder.place_steps(optimizer)
    stream = _without(recorder.close(), _outside_the_allocator(optimizer, recorder))
    expansion = expand(stream, depth, layers_path=recording.layers_path)
    marks = expansion.stream.marks
    return OptimizerRecording(
        stream=expansion.stream,
        parts={label: (start, end) for (start, label), (end, _) in zip(marks[::2], marks[1::2], strict=True)},
        gradients={
            part: tuple(
                _of_layer(numbers[index if is_whole else each.recorded], each.layer, expansion)
                for index, each in enumerate(recording.trained)
            )
            for part, numbers in gradients.items()
        },
        work=recorder.work.over_all_layers(depth),
    )


def _all_layers(trained: Sequence[TrainedWeight]) -> tuple[LearningWeight, ...]:
    return tuple(
        LearningWeight(shape=each.shape, dtype=each.dtype, layer=each.layer, has_gradient=each.gradient is not None)
        for each in trained
    )


def _of_layer(number: int | None, layer: int | None, expansion: Expansion) -> int | None:
    return None if number is None else expansion.number(number, layer)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


class _LineageRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Record, for whatever is made from a weight, its gradient or its state, the layer of that weight.

    What is made from a list of them belongs to no layer, and is as large as from the list of all layers.
    """

    def __init__(self, *, temporaries: Temporaries, depth: Depth) -> None:
        super().__init__(temporaries=temporaries)
        self._num_like: Counter[int | None] = Counter({None: 1})  # layers of the model that a recorded one stands for
        self._num_like.update(depth.template(layer) for layer in range(depth.num_layers))
        self._layers: dict[int, int | None] = {}  # storage -> layer
        self._layer: int | None = None

    def assign_layer(self, tensor: torch.Tensor, layer: int | None) -> None:
        """Say which layer a storage belongs to."""
        number = self.number_of(tensor)
        assert number is not None
        self._layers[number] = layer

    def place_steps(self, optimizer: Optimizer) -> None:
        """Say of each weight's step count which layer it belongs to: it is made of nothing that would tell."""
        states = optimizer.state.items()
        steps = {self.number_of(each["step"]): self.layer_of(weight) for weight, each in states if "step" in each}
        for position, number in enumerate(self.stream.storages):
            if number in steps:
                self.stream.places[position] = replace(self.stream.places[position], layer=steps[number])

    def layer_of(self, value: Any) -> int | None:
        """Return the layer of a tensor; None where it belongs to none, or is not a tensor."""
        number = self.number_of(value) if isinstance(value, torch.Tensor) else None
        return None if number is None else self._layers.get(number)

    def _outputs(self, out: Any, args: tuple[Any, ...]) -> None:
        first = args[0] if args else None
        outputs = list(out) if isinstance(out, (list, tuple)) else [out]
        sources = (
            list(first) if isinstance(first, (list, tuple)) and len(first) == len(outputs) else [first] * len(outputs)
        )
        for each, source in zip(outputs, sources, strict=True):
            if isinstance(each, torch.Tensor):
                self._layer = self.layer_of(source)
                self._see(each)
                number = self.number_of(each)
                if number is not None:
                    self._layers.setdefault(number, self._layer)
        self._layer = None

        if isinstance(out, torch.Tensor) and _are_tensors(first):
            self._resize(out, cast(Any, first))

    def _resize(self, joined: torch.Tensor, parts: Sequence[Any]) -> None:
        """Give a tensor that joins a list's elements the size that it has for all layers."""
        number = self.number_of(joined)
        if number is not None and joined.nbytes == sum(part.nbytes for part in parts):
            self.stream.sizes[number] = sum(part.nbytes for part in self._of_all_layers(parts))

    def note(self, operator: str, work: OperatorWork, *, about: torch.Tensor) -> None:
        self._layer = self.layer_of(about)
        super().note(operator, work, about=about)
        self._layer = None

    def _count(self, work: OperatorWork | None, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Count lists as those of all layers; work on one tensor is done in each layer that its own stands for."""
        if args and _are_tensors(args[0]):
            args = tuple(self._of_all_layers(each) if _are_tensors(each) else each for each in args)
            work = operator_work(func, args, kwargs, out)
        else:
            self._layer = self.layer_of(args[0]) if args else None
        super()._count(work, func, args, kwargs, out)
        self._layer = None

    def _scratch_bytes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        if args and _are_tensors(args[0]):
            args = (self._of_all_layers(args[0]), *args[1:])
        return super()._scratch_bytes(name, args, kwargs)

    def _of_all_layers(self, values: Sequence[Any]) -> list[Any]:
        """Return the list of the whole model, right in its length and in the sizes in it, but not in their order."""
        return [value for value in values for _ in range(self._num_like[self.layer_of(value)])]

    def _where(self, node: Any) -> tuple[str, int | None]:
        return "", self._layer


def _give_gradients(
    recorder: _LineageRecorder, weights: Sequence[nn.Parameter], chosen: Sequence[LearningWeight]
) -> list[int | None]:
    numbers: list[int | None] = []
    for weight, each in zip(weights, chosen, strict=True):
        weight.grad = torch.empty_like(weight) if each.has_gradient else None
        numbers.append(None if weight.grad is None else recorder.born(weight.grad, "gradients"))
    return numbers


def _outside_the_allocator(optimizer: Optimizer, recorder: Recorder) -> set[int]:
    """Return step counters that PyTorch keeps on the CPU, and states in memory that CUDA shares with the machine."""
    fused = optimizer.defaults.get("fused")  # whose counters are on the device
    states = (
        [] if fused else [each["step"] for each in optimizer.state.values() if isinstance(each.get("step"), Tensor)]
    )
    if isinstance(optimizer, StandInOptimizer):
        states += optimizer.paged
    return {number for state in states if (number := recorder.number_of(state)) is not None}


def _without(stream: EventStream, storages: set[int]) -> EventStream:
    """Return the stream without some storages; the others keep their numbers."""
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


def traceable_optimizer(settings: OptimizerConfig, parameters: Sequence[Parameter], *, device_type: str) -> Optimizer:
    """Build the optimizer that the configuration names, or a stand-in if it is one of bitsandbytes'.

    device_type: of the device that the parameters, fake ones of the CPU, stand for.
    """
    rule = state_rule(settings)
    if rule is not None:
        return StandInOptimizer(parameters, rule)
    return build_optimizer(settings, parameters, device_type=device_type)


class StandInOptimizer(Optimizer):
    """Stand in for Optimizer1State or Optimizer2State (optim/optimizer.py), without kernels, which allocate nothing."""

    def __init__(self, parameters: Iterable[Parameter], rule: StateRule) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.rule = rule
        self.tables: list[Tensor] = []  # of 8-bit values, on the device since the first 8-bit state
        self.paged: list[Tensor] = []  # states outside the caching allocator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states, parameter by parameter, in the first step; no step makes anything else."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._make_states(parameter)
                states = (state for state in self.state[parameter].values() if state.numel() == parameter.numel())
                read_and_written = (parameter, *states)
                note_kernel("optimizer", *read_and_written, *read_and_written, parameter.grad)

    def _make_states(self, parameter: Parameter) -> None:
        if self.rule.is_8bit(parameter.numel()) and not self.tables:
            size = DYNAMIC_MAP_BYTES // 4
            self.tables = [torch.zeros(size, device=parameter.device) for _ in range(self.rule.num_states)]
        states = self.state[parameter]
        for tensor in state_tensors(self.rule, parameter.numel()):
            states[tensor.name] = _made(tensor, parameter)
            if tensor.paged:
                self.paged.append(states[tensor.name])
        if self.rule.is_8bit(parameter.numel()):
            states.update({f"qmap{number}": table for number, table in enumerate(self.tables, 1)})


def _made(tensor: StateTensor, parameter: Parameter) -> Tensor:
    """Make a state from the parameter, so that a recorder can tell whose state it is."""
    if tensor.name.startswith("absmax"):
        return parameter.new_zeros((tensor.num_elements,), dtype=torch.float32)
    return torch.zeros_like(parameter, dtype=torch.uint8 if tensor.element_bytes == 1 else torch.float32)


# Optimizer1State and Optimizer2State, optim/optimizer.py.
_ONE_STATE = ("lion", "lion_8bit", "sgd_8bit", "rmsprop_8bit", "adagrad_8bit", "paged_lion", "paged_lion_8bit")


_TWO_STATES = (
    "adam_8bit",
    "adamw_8bit",
    "paged_adam",
    "paged_adamw",
    "paged_adam_8bit",
    "paged_adamw_8bit",
)


_BLOCK_SIZE = 256  # elements that share a scale: init_state


_LEAST_PAGED = 100_000  # elements; smaller states are not paged: get_state_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """Describe how one of bitsandbytes' optimizers keeps its states."""

    num_states: int  # also of the tables of 8-bit values, which all parameters share
    bits: int
    paged: bool
    min_8bit_size: int  # elements; smaller parameters keep 32-bit states

    def is_8bit(self, num_elements: int) -> bool:
        return self.bits == 8 and num_elements >= self.min_8bit_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """Describe a state of one parameter; paged ones are in memory shared with the machine (cudaMallocManaged).

    The caching allocator does not know of those; on the GPU they take what others leave free.
    """

    name: str  # state1, state2, absmax1 or absmax2
    num_elements: int
    element_bytes: int
    paged: bool

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


def state_rule(settings: OptimizerConfig) -> StateRule | None:
    """Return the rule of an optimizer of bitsandbytes; None for torch's."""
    if settings.type not in _ONE_STATE + _TWO_STATES:
        return None
    return StateRule(
        num_states=1 if settings.type in _ONE_STATE else 2,
        bits=8 if settings.type.endswith("_8bit") else 32,
        paged=settings.type.startswith("paged_"),
        min_8bit_size=settings.model_dump().get("min_8bit_size", 0),
    )


def state_tensors(rule: StateRule, num_elements: int) -> tuple[StateTensor, ...]:
    """List the states of a parameter of so many elements, in the order in which init_state makes them."""
    eight = rule.is_8bit(num_elements)
    numbers = range(1, rule.num_states + 1)
    paged = rule.paged and num_elements >= _LEAST_PAGED
    element_bytes = 1 if eight else 4
    states = [
        StateTensor(name=f"state{number}", num_elements=num_elements, element_bytes=element_bytes, paged=paged)
        for number in numbers
    ]
    if eight:
        blocks = -(-num_elements // _BLOCK_SIZE)
        states += [
            StateTensor(name=f"absmax{number}", num_elements=blocks, element_bytes=4, paged=False) for number in numbers
        ]
    return tuple(states)


def paged_bytes(settings: OptimizerConfig, num_elements: Iterable[int]) -> int:
    """Return what the states of weights of so many elements take outside the caching allocator."""
    rule = state_rule(settings)
    if rule is None:
        return 0
    return sum(state.num_bytes for each in num_elements for state in state_tensors(rule, each) if state.paged)


DYNAMIC_MAP_BYTES = 256 * 4  # fp32: create_dynamic_map, functional.py
