"""Which operator ran when, in which module and phase, while a step runs."""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.memory.events import Place

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


class OperatorLog:
    """Written while the steps run: operators with their places, and the marks at which a part of the work begins.

    on_operator: called before each operator with its number. on_mark: called at each mark.
    """

    def __init__(
        self, *, on_operator: Callable[[int], None] = lambda number: None, on_mark: Callable[[], None] = lambda: None
    ) -> None:
        self.times_ns: list[int] = []  # of each operator, when it began
        self.places: list[Place] = []
        self.marks: list[tuple[int, str]] = []  # time in ns, what begins then
        self.made_at: dict[int, int] = {}  # address -> number of the operator that gave this storage last
        self._on_operator = on_operator
        self._on_mark = on_mark
        self._phase, self._prefix = "load", ""
        self._forward: list[str] = []  # modules that are running, the outermost first
        self._backward = ""  # the module whose output's gradient came last

    def begin(self, phase: str, prefix: str | None = None) -> None:
        """From here on it is this phase. prefix: stands before its mark, such as "step 1"; None leaves it."""
        if prefix is not None:
            self._prefix = prefix
        self._phase = phase
        self._on_mark()
        self.marks.append((time.time_ns(), f"{self._prefix}: {phase}" if self._prefix else phase))

    def begin_once(self, phase: str) -> None:
        """As `begin`, unless it is this phase already."""
        if phase != self._phase:
            self.begin(phase)

    def place_at(self, time_ns: int) -> Place:
        """Where the work was at a time: at the last operator that had begun."""
        number = bisect.bisect_right(self.times_ns, time_ns) - 1
        return self.places[number] if number >= 0 else Place(self._phase)

    def where(self) -> Mapping[int, str]:
        """By address, the module and operator that made the storage."""
        return {address: said(self.places[number]) for address, number in self.made_at.items()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Log the operators that run inside, with the modules of this model."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                hooks.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            hooks.enter_context(_Watcher(self))
            yield

    def operator(self, name: str) -> None:
        if name.startswith("profiler."):
            return  # the optimizer's name for the profiler: it does nothing to memory
        # Set in the thread that runs the backward pass, wherever that is.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self.begin_once("backward")
        module = self._forward[-1] if self._forward else self._backward if in_backward else ""
        self._on_operator(len(self.places))
        self.times_ns.append(time.time_ns())
        self.places.append(Place(self._phase, layer_of(module), module, name))

    def made(self, outputs: object) -> None:
        number = len(self.places) - 1
        if number < 0:
            return
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self.made_at[each.untyped_storage().data_ptr()] = number

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: object) -> None:
            self._forward.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def gradient_came(gradient: Tensor) -> None:
            self._backward = name

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            self._forward.pop()
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.requires_grad and torch.is_grad_enabled():
                    each.register_hook(gradient_came)  # type: ignore[no-untyped-call]
                    break

        return leave


def layer_of(module: str) -> int | None:
    """The decoder layer in a module's dotted path, from 0."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def said(place: Place) -> str:
    """A place in a few words."""
    return ", ".join(part for part in (place.phase, place.module, place.operator) if part)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: OperatorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._log.operator(str(func.overloadpacket))
        outputs = func(*args, **(kwargs or {}))
        self._log.made(outputs)
        return outputs
