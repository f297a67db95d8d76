"""CPU autocast made to cast as CUDA autocast does.

Both lower the inputs of matrix products, keep a lowered copy of each weight that trains until the outermost autocast
ends, and leave other operators alone; they differ in the operators that run in fp32 or in the widest input's dtype.
After AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE in aten/src/ATen/autocast_mode.h of PyTorch
(the lists of CUDA), and the lists of AutocastCPU in autocast_mode.cpp; of them, what language models use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library, fallthrough_kernel
from torch.utils._pytree import tree_flatten, tree_map_only

_KEY = "AutocastCPU"
_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# In half precision on the CPU, in fp32 on CUDA.
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
# Promoted by CPU autocast; on CUDA the operators promote by themselves, without copies of the inputs.
LEFT_ALONE = ("cat", "stack")
# In fp32 as one operator on the CPU; on CUDA its parts are cast, each by itself: the logarithm of the softmax stays in
# half precision, since the caller names a dtype, and the loss takes an fp32 copy of it.
IN_PARTS = ("cross_entropy_loss",)


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Within this, torch.autocast("cpu", ...) casts as torch.autocast("cuda", ...) would, for all threads."""
    policies: tuple[tuple[tuple[str, ...], Callable[[str], Any]], ...] = (
        (FP32, _fp32),
        (FP32_RESULT, _fp32_result),
        (PROMOTE, _promote),
        (LOWER, _lower),
        (LEFT_ALONE, _operator),
    )
    with _scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")  # of LEFT_ALONE
            for operators, policy in policies:
                for name in operators:
                    library.impl(name, _without_autocast(policy(name)), _KEY, allow_override=True)
            for name in IN_PARTS:
                library.impl(name, fallthrough_kernel, _KEY, allow_override=True)
        with _seen_as_cudas():
            yield


@contextmanager
def _seen_as_cudas() -> Iterator[None]:
    """Have `torch.is_autocast_enabled()`, which is of CUDA, answer for the CPU.

    PEFT's layers over quantised weights ask it, and cast their input to fp32 where it is off.
    """
    asked = torch.is_autocast_enabled

    def is_enabled(*device_type: str) -> bool:
        return asked(*device_type or ("cpu",))

    torch.is_autocast_enabled = is_enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_autocast_enabled = asked


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return run(*args, **kwargs)

    return kernel


def _fp32(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.float32)
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


def _promote(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtypes = {each.dtype for each in tree_flatten((args, kwargs))[0] if _is_eligible(each)}
        if torch.float32 in dtypes:
            args, kwargs = _cast((args, kwargs), torch.float32)
        return operator(*args, **kwargs)

    return run


def _lower(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
        return operator(*args, **kwargs)

    return run


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if _is_eligible(each) else each, arguments)


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
