"""FLOPs, bytes and kernels of one operator, by the shapes that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from brim.memory.work import Unit

Arguments: TypeAlias = tuple[Any, ...]
Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Of one call of an operator."""

    unit: Unit
    dtype: str
    flops: int
    num_bytes: int
    kernels: int = 1


Rule: TypeAlias = Callable[[Arguments, Options, Any], OperatorWork]

# They compute nothing, and are no views by their schema.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "resize_",
        "set_",
        "is_same_size",
        "_local_scalar_dense",
        "_has_compatible_shallow_copy_type",
    )
)
_OVERWRITING = frozenset(("aten::zero_", "aten::fill_", "aten::copy_"))  # what they are called on is not read
# They read as much of their first tensor as they return.
_GATHERING = frozenset(f"aten::{name}" for name in ("embedding", "index_select", "gather", "index", "nll_loss_forward"))
# They touch as much of the tensor that they are called on as the values are, which come last.
_SCATTERING = frozenset(
    f"aten::{name}"
    for name in ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_add_", "scatter_")
)
# Tensors that one launch takes, by the number of lists (depth_to_max_tensors in MultiTensorApply.cuh of PyTorch).
_TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)
_CHUNKS_A_LAUNCH, _CHUNK = 320, 65536  # the same file


def operator_work(func: Any, args: Arguments, kwargs: Options, out: Any) -> OperatorWork | None:
    """What a call of an operator of ATen takes; None where no kernel runs, as for views."""
    rule = _rule(func)
    return None if rule is None else rule(args, kwargs, out)


def attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, causal: bool, backward: bool
) -> int:
    """Two products forward, five backward (one of them computes the scores anew), half of each where causal.

    query: [B, H, T, D]; key: [B, K, S, D]; value: [B, K, S, E]. After Dao et al., FlashAttention-2 (2023), section 4.1.
    """
    rows, heads, queries, width = query
    scores = rows * heads * queries * key[-2]
    flops = scores * (6 * width + 4 * value[-1] if backward else 2 * width + 2 * value[-1])
    return flops // 2 if causal else flops


def num_bytes_of(tensor: Tensor) -> int:
    """Bytes that are read where all of a tensor is; what is expanded lies there once."""
    num_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            num_bytes *= size
    return num_bytes


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@cache
def _rule(func: Any) -> Rule | None:
    name: str = func._schema.name
    if name in _FREE or any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
        return None
    if name.startswith("aten::_scaled_dot_product_"):
        return _attention(func)
    if func.overloadpacket in flop_registry:
        return _product(flop_registry[func.overloadpacket])
    if name.startswith(("aten::_foreach_", "aten::_fused_ad", "aten::_fused_sgd")):
        return _over_lists(name)
    if name in _GATHERING:
        return _gather
    if name in _SCATTERING:
        return _scatter
    return _overwrite if name in _OVERWRITING else _elementwise


def _product(flops_of: Callable[..., int]) -> Rule:
    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        tensors = [each for each in args if isinstance(each, Tensor)]
        flops = flops_of(*args, **kwargs, out_val=out)
        return OperatorWork("matrix", dtype_name(tensors[-1].dtype), int(flops), _moved(args) + _moved(out))

    return rule


def _attention(func: Any) -> Rule:
    names = [each.name for each in func._schema.arguments]
    backward = "grad_out" in names or "grad_out_" in names
    first = names.index("query")

    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = args[first : first + 3]
        masked = given.get("attn_mask") is not None or given.get("attn_bias") is not None
        causal = bool(given.get("is_causal")) and not masked
        flops = attention_flops(query.shape, key.shape, value.shape, causal=causal, backward=backward)
        return OperatorWork("attention", dtype_name(query.dtype), flops, _moved(args) + _moved(out))

    return rule


def _over_lists(name: str) -> Rule:
    """Their results are of the shapes of the first list, but for norms."""
    writes = 0 if name == "aten::_foreach_norm" else 3 if "_fused_adam" in name else 1
    # A fused update takes weights, gradients and averages, and writes all but the gradients.
    written = (0, 2, 3) if writes == 3 else (0,) * writes

    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
        first = lists[0]
        chunks = sum(-(-each.numel() // _CHUNK) for each in first)
        tensors = _TENSORS_A_LAUNCH[min(len(lists), len(_TENSORS_A_LAUNCH)) - 1]
        kernels = max(1, -(-len(first) // tensors), -(-chunks // _CHUNKS_A_LAUNCH))
        num_bytes = _moved(args) + sum(_moved(lists[number]) for number in written)
        return OperatorWork("vector", dtype_name(first[0].dtype), 0, num_bytes, kernels)

    return rule


def _gather(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    first = out[0] if isinstance(out, tuple) else out
    return OperatorWork("vector", dtype_name(first.dtype), 0, 2 * _moved(first) + _moved(args[1:]))


def _scatter(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    values = next(each for each in reversed((*args, *kwargs.values())) if isinstance(each, Tensor))
    return OperatorWork("vector", dtype_name(args[0].dtype), 0, 2 * _moved(values) + _moved(args[1:]))


def _overwrite(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    return OperatorWork("vector", dtype_name(args[0].dtype), 0, _moved(args[0]) + _moved(args[1:]))


def _elementwise(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    num_bytes = _moved(args) + _moved(out) + (_moved(tuple(kwargs.values())) if kwargs else 0)
    first = out if isinstance(out, Tensor) else next((each for each in args if isinstance(each, Tensor)), None)
    return OperatorWork("vector", "" if first is None else dtype_name(first.dtype), 0, num_bytes)


def _moved(value: Any) -> int:
    if isinstance(value, Tensor):
        return num_bytes_of(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_moved, value))
    return 0
