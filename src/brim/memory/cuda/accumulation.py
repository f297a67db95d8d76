"""Gradients added up in place, as autograd does for a device's tensors and not for fake ones.

Autograd adds into the gradient that it holds already, where nothing else refers to it (can_accumulate_inplace and
accumulate in torch/csrc/autograd/input_buffer.cpp of PyTorch), and the gradients of operators that pick elements write
into new zeros (index_select_backward, index_backward, gather_backward and value_selecting_reduction_backward in
FunctionsManual.cpp and TensorAdvancedIndexing.cpp). For subclasses of Tensor, as fake tensors are, both make a new
tensor: a trace would see one more at each residual connection, and the logits' gradient twice.
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

from brim.memory.fake_results import DEVICE_OF

_ADD = torch.ops.aten.add.Tensor
_INTO_ZEROS: Mapping[Any, Any] = {
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
_PICKS = ("IndexSelectBackward", "IndexBackward", "GatherBackward", "TopkBackward", "SortBackward", "MaxBackward")


class AccumulationInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it last, so that it sees an operator's arguments first: it counts who refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references = _references_to_a_lone_gradient()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if func is _ADD and not kwargs and _is_accumulation(args) and _references(args) == self._references:
            return args[0].add_(args[1])
        if func in _INTO_ZEROS and _is_gradient_of_a_pick():
            func = _INTO_ZEROS[func]
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


def _is_gradient_of_a_pick() -> bool:
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    return node is not None and node.name().startswith(_PICKS)


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the mode that it counts for

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
