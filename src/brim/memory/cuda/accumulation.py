"""Gradients of a tensor that several operators read, added up in place as autograd does for tensors of a device.

Autograd adds into the gradient that it holds already, where nothing else refers to it (can_accumulate_inplace and
accumulate in torch/csrc/autograd/input_buffer.cpp of PyTorch); for subclasses of Tensor, as fake tensors are, it makes
a new one, so that a trace would see one tensor more at each residual connection.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ADD = torch.ops.aten.add.Tensor


class AccumulationInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it last, so that it sees an operator's arguments first: it counts who refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references = _references_to_a_lone_gradient()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ADD and not kwargs and _is_accumulation(args) and _references(args) == self._references:
            return args[0].add_(args[1])
        return func(*args, **(kwargs or {}))


def _is_accumulation(args: tuple[Any, ...]) -> bool:
    """Two gradients of one shape, added in a backward pass that is not itself differentiated."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    held, new = args
    return (
        isinstance(new, Tensor)
        and held is not new
        and held.shape == new.shape
        and held.dtype == new.dtype
        and _is_dense(held)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Every element of its stretch of memory stands for one of its own."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Those to the Python object, to the tensor and to its storage."""
    held = args[0]
    storage = held.untyped_storage()
    uses: int = held._use_count()
    return sys.getrefcount(held), uses, torch._C._storage_Use_Count(storage._cdata)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[tuple[int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ADD and not kwargs and _is_accumulation(args):
            self.counted.append(_references(args))
        return func(*args, **(kwargs or {}))


@cache
def _references_to_a_lone_gradient() -> tuple[int, int, int]:
    """Counted once where nothing but autograd holds the gradient; it depends on the versions of Python and PyTorch."""
    counter = _Counter()
    with _disable_current_modes(), FakeTensorMode(), counter, torch.enable_grad():
        start = torch.empty(2, requires_grad=True)
        middle = start * 2
        (middle.relu() + middle.tanh()).backward(torch.empty(2))  # type: ignore[no-untyped-call]
    assert len(counter.counted) == 1
    return counter.counted[0]
