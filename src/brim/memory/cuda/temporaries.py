"""Bytes that an operator's CUDA kernel allocates beside its outputs, and frees before it returns.

Only what can reach the size of activations is listed; scratch space of a few kilobytes (reductions over everything,
partial sums of a norm's weights, `topk` of short rows) is left out. Each rule names the function of PyTorch that
allocates. Legend: N elements of the indices, P partial segments, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_INDEX = 8  # bytes of an int64


def cuda_temporaries(operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes for a call of this operator, by name such as "aten::sort"."""
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, kwargs)


def _embedding_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """embedding_dense_backward_cuda and embedding_backward_cuda_kernel (Embedding.cu, EmbeddingBackwardKernel.cu).

    Above 3,072 indices they are sorted, and the rows of each token are added up in parts of ten; there is room for as
    many parts as there can be.
    """
    grad: Tensor = args[0]
    count: int = args[1].numel()
    num_weights: int = args[2]
    if count <= 3072:
        return 0
    segments = min(count, num_weights)
    parts = count // 10 + segments
    return _INDEX * (2 * count + count + 2 * segments + parts) + _accumulated(grad) * parts * grad.shape[-1]


def _sort(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """sort_cuda_kernel and launch_stable_sort_kernel (SortStable.cu, Sort.cu).

    Rows of up to 4,096 are sorted in place. Longer ones by cub: one row with its numbers and a second copy of both;
    several with pairs of row and number, twice, the values and cub's second copy of them.
    """
    values: Tensor = args[0]
    row = values.shape[-1] if values.dim() else 1
    if row <= 4096:
        return 0
    size, count = values.element_size(), values.numel()
    if count == row:
        return count * (_INDEX + _INDEX + size)
    return count * (2 * _INDEX + size + _INDEX + size)


def _topk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """should_use_sort (TensorTopK.cpp): up to ten rows of 100,000 or more are sorted whole."""
    values: Tensor = args[0]
    row = values.shape[-1] if values.dim() else 1
    if row < 100_000 or values.numel() // row > 10:
        return 0
    return values.numel() * (values.element_size() + _INDEX) + _sort((values,), {})


def _multinomial(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """multinomial (Distributions.cpp): one draw divides the probabilities by exponential noise of their shape."""
    probabilities: Tensor = args[0]
    return probabilities.numel() * probabilities.element_size()


def _safe_softmax(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """_safe_softmax (SoftMax.cpp): the softmax, and where the scores are minus infinity, before the result."""
    scores: Tensor = args[0]
    return scores.numel() * (scores.element_size() + 1)


def _index_put(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """index_put_with_sort_kernel (Indexing.cu): sums into repeated places go by sorted linear indices."""
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulates:
        return 0
    shapes = [each.shape for each in args[1] if each is not None]
    count = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return _INDEX * 6 * count  # linear, its order, both sorted, and cub's second copy of both


def _foreach_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """foreach_tensor_norm_cuda (ForeachReduceOp.cu): a partial norm for each 65,536 elements of the longest tensor."""
    tensors: Sequence[Tensor] = args[0]
    longest = max((each.numel() for each in tensors), default=0)
    return _accumulated(tensors[0]) * len(tensors) * -(-longest // 65536) if tensors else 0


def _int8_dequantized(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """int8_vectorwise_dequant (_ops.py of bitsandbytes): the weight times its scales, in fp32, before the result."""
    weight: Tensor = args[0]
    return 4 * weight.numel()


def _accumulated(tensor: Tensor) -> int:
    """Bytes of an element in the dtype that sums are kept in."""
    return max(4, tensor.element_size())


_RULES: Mapping[str, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::sort": _sort,
    "aten::argsort": _sort,
    "aten::topk": _topk,
    "aten::multinomial": _multinomial,
    "aten::_safe_softmax": _safe_softmax,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_foreach_norm": _foreach_norm,
    "bitsandbytes::int8_vectorwise_dequant": _int8_dequantized,  # DoRA over 8-bit weights
}
