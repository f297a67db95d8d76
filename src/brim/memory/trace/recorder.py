"""Record what real model code does to memory while it runs on fake tensors.

The model's weights have shapes and no values. A `Workload` says what is traced: a model, what is done with it, and
how the target device differs from this one.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from brim.memory.events import Category, EventStream, Place, Unit, WorkCounter, WorkPlace
from brim.memory.trace.operators import DEVICE_OF, OperatorWork, dtype_name, num_bytes_of, result_and_work

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_fake(
    architecture: PretrainedConfig, build: Callable[[PretrainedConfig], nn.Module], mode: FakeTensorMode
) -> nn.Module:
    """Build a model on fake tensors of the CPU, by way of the meta device, where nothing is computed.

    transformers' no_init_weights would leave out the tying of the head to the embeddings, too.
    """
    with torch.device("meta"):
        model = build(architecture)
    _replace_tensors(model, mode)
    return model


def _replace_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all tensors by fake ones; tied weights stay one. By way of operators it takes ten times as long."""
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    fake = replaced[id(tensor)] = FakeTensor(mode, made, torch.device("cpu"))
                    if isinstance(tensor, Parameter):
                        fake.requires_grad_(tensor.requires_grad)._is_param = True
                tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hold the parts of one optimizer step, as the training loop runs them."""

    micro_batch: Callable[[nn.Module, Any], None]  # forward and backward
    optimizer: Callable[[Sequence[Parameter]], Optimizer]
    accumulates: bool  # several micro-batches make a step
    update: Callable[[Sequence[Parameter], Optimizer], None]  # from gradients to weights, gradients dropped


def no_temporaries(operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return 0, for an operator that allocates nothing beyond its outputs."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Hold everything that a trace runs, as callables that it runs on fake tensors.

    batch: returns the input of `rows` × `tokens`, as tensors on the device. run: runs a phase without gradients; it is
    given a function to call when something begins, such as "prefill". settle: called before anything is recorded.
    view: returns a context in which operators do what the target device would do; without a model (None), the
    optimizer's operators alone.
    """

    architecture: PretrainedConfig
    build: Callable[[PretrainedConfig], nn.Module]  # on the meta device, with adapter and all, in training mode or not
    batch: Callable[[int, int], Any]
    settle: Callable[[nn.Module], None] = lambda model: None
    training: Training | None = None
    run: Callable[[nn.Module, Any, Callable[[str], None]], None] | None = None
    view: Callable[[nn.Module | None], AbstractContextManager[Any]] = nullcontext
    temporaries: Temporaries = no_temporaries


_OUTSIDE_THE_SEQUENCE = 2**62  # nodes that accumulate gradients have the highest sequence numbers


Temporaries = Callable[[str, tuple[Any, ...], Mapping[str, Any]], int]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch each storage from its birth to its death, inside a FakeTensorMode.

    The model's modules name the places; those in the list of decoder layers carry a layer's number. A place in the
    backward pass is that of the forward operator whose gradient is computed, found by autograd's sequence numbers, so
    that no hook changes the graph.
    temporaries: returns the bytes that an operator allocates and frees within itself, on the target device.
    """

    def __init__(self, *, temporaries: Temporaries = no_temporaries) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = EventStream()
        self.phase = ""  # of whatever runs outside autograd's nodes; those are the backward pass
        self._temporaries = temporaries
        self._live: dict[int, int] = {}  # a storage's address -> its number in the stream
        self._references: dict[int, weakref.ref[Any]] = {}
        self._stack: list[tuple[str, int | None]] = []
        self._modules: dict[nn.Module, tuple[str, int | None]] = {}
        self._sequence_numbers: list[int] = []
        self._at_sequence_number: list[tuple[str, int | None]] = []
        self._places: dict[tuple[str, int | None, str, str], Place] = {}
        self._operator = ""
        self._closed = False
        self._last: tuple[str, int | None] = ("", None)
        self.recomputed: set[int] = set()  # born while activations were recomputed, and alive afterwards
        self.work = WorkCounter()

    def know(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Name places by this model's modules, from here on."""
        numbers = {id(layer): number for number, layer in enumerate(layers)}
        layer_of: dict[str, int | None] = {}
        for name, module in model.named_modules():  # parents come before their children
            layer_of[name] = numbers.get(id(module), layer_of.get(name.rpartition(".")[0]))
            self._modules[module] = (name, layer_of[name])

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the storage's number in the stream; None where it was not seen."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def born(self, tensor: Tensor, category: Category) -> int:
        """Enter a storage that exists already, such as a weight, and return its number."""
        storage = tensor.untyped_storage()
        number = self._live.get(storage._cdata)
        if number is None:
            number = self._enter(storage, category)
        return number

    def enter_weights(self, model: nn.Module) -> None:
        """Enter a model's weights and buffers, module by module, each at the place of its module."""
        for module in model.modules():
            self._stack.append(self._modules.get(module, ("", None)))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.born(tensor, "weights")
            self._stack.pop()

    def categorize(self, tensor: Tensor, category: Category) -> None:
        """Say what a storage that was seen is for."""
        number = self.number_of(tensor)
        if number is not None:
            self.stream.categories[number] = category

    def close(self) -> EventStream:
        """End the recording, and return the stream."""
        self._closed = True
        return self.stream

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Keep track of which module runs."""
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and guarding against it takes longer than all else

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        name = func._schema.name
        self._operator = name
        scratch_bytes = self._scratch_bytes(name, args, kwargs)
        scratch = self.stream.birth(scratch_bytes, "temporary", self._place()) if scratch_bytes else None
        out, work = result_and_work(func, args, kwargs)
        self._count(work, func, args, kwargs, out)
        self._outputs(out, args)
        if name == "aten::_to_copy":
            self._lower_weight(args[0], out)
        if scratch is not None:
            self.stream.death(scratch, self._place())
        return out

    def note(self, operator: str, work: OperatorWork, *, about: Tensor) -> None:
        """Enter a kernel that is not an operator of the trace."""
        self._enter_work(operator, work)

    def _count(self, work: OperatorWork | None, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        if work is not None:
            self._enter_work(self._operator, work)

    def _enter_work(self, operator: str, work: OperatorWork) -> None:
        node = torch._C._current_autograd_node()
        phase = self.phase if node is None else "recompute" if self._stack else "backward"
        module, layer = self._where(node)
        self.work.add(
            self.stream.marks[-1][1] if self.stream.marks else "",
            WorkPlace(phase, layer, module, operator, work.unit, work.dtype),
            flops=work.flops,
            num_bytes=work.num_bytes,
            kernels=work.kernels,
        )

    def _scratch_bytes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        return self._temporaries(name, args, kwargs)

    def _lower_weight(self, source: Tensor, copy: Tensor) -> None:
        """Count a weight's copy in another dtype, which autocast keeps, among the weights."""
        number, copied = self.number_of(source), self.number_of(copy)
        if number is not None and copied is not None and self.stream.categories[number] == "weights":
            self.stream.categories[copied] = "weights"

    def _outputs(self, out: Any, args: tuple[Any, ...]) -> None:
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                self._outputs(each, args)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._enter(storage, "temporary")  # `categorize` corrects it afterwards

    def _enter(self, storage: Any, category: Category) -> int:
        address = storage._cdata
        number = self.stream.birth(storage.nbytes(), category, self._place())
        if self._stack and torch._C._current_autograd_node() is not None:
            self.recomputed.add(number)
        self._live[address] = number
        self._references[address] = weakref.ref(storage, lambda _: self._die(address))
        return number

    def _die(self, address: int) -> None:
        number = self._live.pop(address)
        del self._references[address]
        if self._stack:
            self.recomputed.discard(number)
        if not self._closed:
            self.stream.death(number, self._place())

    def _place(self) -> Place:
        node = torch._C._current_autograd_node()
        module, layer = self._where(node)
        key = ("backward" if node is not None else self.phase, layer, module, self._operator)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(*key)
        return place

    def _where(self, node: torch.autograd.graph.Node | None) -> tuple[str, int | None]:
        if self._stack:
            return self._stack[-1]
        if node is None:
            return "", None
        number = node._sequence_nr()
        position = bisect_right(self._sequence_numbers, number) - 1
        if position >= 0 and number < _OUTSIDE_THE_SEQUENCE:
            self._last = self._at_sequence_number[position]
        return self._last

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        around = self._stack[-1] if self._stack else ("", None)
        self._stack.append(self._modules.get(module, around))  # another's module counts as a function
        self._note_sequence_number()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._note_sequence_number()

    def _note_sequence_number(self) -> None:
        self._sequence_numbers.append(torch._C._autograd._get_sequence_nr())
        self._at_sequence_number.append(self._stack[-1] if self._stack else ("", None))


def note_kernel(
    operator: str,
    *tensors: Tensor,
    flops: int = 0,
    unit: Unit = "vector",
    num_bytes: int | None = None,
) -> None:
    """Report to the recorder, if any, a kernel that a stand-in replaces, and that is not an operator itself.

    tensors: those that the kernel reads and writes; the first one has the dtype of the arithmetic. num_bytes: given
    where the kernel touches less or more than all of them.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder):
            moved = sum(map(num_bytes_of, tensors)) if num_bytes is None else num_bytes
            work = OperatorWork(unit, dtype_name(tensors[0].dtype), flops, moved)
            mode.note(operator, work, about=tensors[0])
