"""Make CPU autocast and gradient accumulation behave on fake tensors as they do on CUDA.

Both autocasts lower the inputs of matrix products, keep a lowered copy of each weight that trains until the outermost
autocast ends, and leave other operators alone; they differ in the operators that run in fp32 or in the widest input's
dtype. The lists follow AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE in
aten/src/ATen/autocast_mode.h of PyTorch (those of CUDA), and those of AutocastCPU in autocast_mode.cpp, as far as
language models use them.

Gradients are added up in place. Autograd adds into the gradient that it holds already, where nothing else refers to
it (can_accumulate_inplace and accumulate in torch/csrc/autograd/input_buffer.cpp of PyTorch), and the gradients of
operators that pick elements write into new zeros (index_select_backward, index_backward, gather_backward and
value_selecting_reduction_backward in FunctionsManual.cpp and TensorAdvancedIndexing.cpp). For subclasses of Tensor,
as fake tensors are, both make a new tensor: a trace would see one more at each residual connection, and the logits'
gradient twice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import _scoped_library, fallthrough_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from brim.memory.trace import DEVICE_OF

_ADD = torch.ops.aten.add.Tensor


_INTO_ZEROS: Mapping[Any, Any] = {
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}


_PICKS = ("IndexSelectBackward", "IndexBackward", "GatherBackward", "TopkBackward", "SortBackward", "MaxBackward")


class AccumulationInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add gradients up in place. Enter it last, so that it sees an operator's arguments first and counts references."""

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
    """Return whether two gradients of one shape are added, in a backward pass that is not itself differentiated."""
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
    """Return whether the tensor fills a stretch of memory without gaps or overlaps."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Count the references to the first argument: to the Python object, to the tensor and to its storage."""
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
    """Count them once where nothing but autograd holds the gradient; versions of Python and PyTorch differ in it."""
    counter = _Counter()
    with _disable_current_modes(), FakeTensorMode(), counter, torch.enable_grad():
        start = torch.empty(2, requires_grad=True)
        middle = start * 2
        (middle.relu() + middle.tanh()).backward(torch.empty(2))  # type: ignore[no-untyped-call]
    assert len(counter.counted) == 1
    return counter.counted[0]


_KEY = "AutocastCPU"


_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


# Run in half precision on the CPU, in fp32 on CUDA.
FP32 = (
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "binary_cross_entropy_with_logits",
    "logsumexp",
)


# The same, but CUDA asks for an fp32 result rather than for fp32 inputs, unless the caller names a dtype.
FP32_RESULT = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
)


# Cast to the widest floating dtype among the inputs.
PROMOTE = ("addcdiv", "addcmul", "dot", "index_put", "scatter_add")


# Lowered as one operator on CUDA, by the products within them on the CPU.
LOWER = ("einsum", "mv", "addmv", "addr")


# Promoted by CPU autocast; on CUDA these operators promote by themselves, without copies of the inputs.
LEFT_ALONE = ("cat", "stack")


# Run in fp32 as one operator on the CPU; on CUDA its parts are cast, each by itself: the logarithm of the softmax stays
# in half precision, since the caller names a dtype, and the loss takes an fp32 copy of it.
IN_PARTS = ("cross_entropy_loss",)


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Have torch.autocast("cpu", ...) cast as torch.autocast("cuda", ...) would, for all threads."""
    policies: tuple[tuple[tuple[str, ...], Callable[[str], Any]], ...] = (
        (FP32, partial(_casting, lambda dtypes: torch.float32)),
        (FP32_RESULT, _fp32_result),
        (PROMOTE, partial(_casting, lambda dtypes: torch.float32 if torch.float32 in dtypes else None)),
        (LOWER, partial(_casting, lambda dtypes: torch.get_autocast_dtype("cpu"))),
        (LEFT_ALONE, _operator),
    )
    is_enabled = torch.is_autocast_enabled
    with _scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")  # of LEFT_ALONE
            for operators, policy in policies:
                for name in operators:
                    library.impl(name, _without_autocast(policy(name)), _KEY, allow_override=True)
            for name in IN_PARTS:
                library.impl(name, fallthrough_kernel, _KEY, allow_override=True)
        # Without an argument it means CUDA's autocast. PEFT's layers over quantised weights call it so, and cast their
        # input to fp32 where it is off.
        with patch.object(torch, "is_autocast_enabled", lambda *device_type: is_enabled(*device_type or ("cpu",))):
            yield


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return run(*args, **kwargs)

    return kernel


def _casting(dtype_of: Callable[[Set[torch.dtype]], torch.dtype | None], name: str) -> Callable[..., Any]:
    """Cast all inputs to the dtype that follows from theirs; None: they stay as they are."""
    operator = _operator(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of({each.dtype for each in tree_leaves((args, kwargs)) if _is_eligible(each)})
        if dtype is not None:
            args, kwargs = tree_map_only(
                Tensor, lambda each: each.to(dtype) if _is_eligible(each) else each, (args, kwargs)
            )
        return operator(*args, **kwargs)

    return run


def _fp32_result(name: str) -> Callable[..., Any]:
    operator = _operator(name)
    position = next(number for number, each in enumerate(operator._schema.arguments) if each.name == "dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            kwargs["dtype"] = torch.float32
            args = args[:position]
        return operator(*args, **kwargs)

    return run


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
