"""Stand in for operators that CUDA runs differently from the CPU, and count their temporary bytes.

Optimizers and gradient norms run over lists of tensors, as PyTorch does by default on CUDA and not on the CPU.

`torch.nn.functional.grouped_mm`, the product of each expert's tokens with its weights, follows _grouped_mm_cuda in
aten/src/ATen/native/cuda/GroupedBlas.cpp and create_grouped_gemm_output_tensor in
aten/src/ATen/native/GroupedMMUtils.h of PyTorch: one output, on every GPU from sm80 on, in half precision and fp32
(PyTorch's own rules for fake tensors accept bf16 alone). Legend: S pairs of a token and an expert, E experts.

`torch.nn.functional.rms_norm`, which CUDA runs as one kernel and the CPU in plain operators, follows rms_norm_symint
in aten/src/ATen/native/layer_norm.cpp and _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu of PyTorch. transformers'
own RMSNorm modules are plain operators on both.

`cuda_temporaries` gives the bytes that an operator's CUDA kernel allocates beside its outputs, and frees before it
returns. Only what can reach the size of activations is listed; scratch space of a few kilobytes (reductions over
everything, partial sums of a norm's weights, `topk` of short rows) is left out. Each rule names the function of
PyTorch that allocates. Legend: N elements of the indices, P partial segments, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils

from brim.memory.cuda.attention import round_up
from brim.memory.trace import note_kernel


@contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Clip and update within this context: PyTorch treats lists of fake CPU tensors as it would lists of CUDA's.

    An optimizer reads its step count, which a fake tensor does not hold; it reads 1 here, since no shape depends on
    it. `torch.optim` keeps each parameter's step count on the CPU, so that its storages are not events of the GPU.
    """
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    with ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
            stack.enter_context(patch.object(module, "_get_foreach_kernels_supported_devices", lambda: devices))
        stack.enter_context(patch.object(FakeTensor, "item", lambda tensor: 1.0))
        yield


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply inputs [S, inputs] by weights [E, inputs, outputs]: [S, outputs]."""
    assert mat_a.dim() == 2
    assert mat_b.dim() == 3
    out: Tensor = _Grouped.apply(mat_a, mat_b)  # type: ignore[no-untyped-call]
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weights)
        out = _output(inputs, inputs.shape[0], weights.shape[-1])
        note_kernel("grouped_mm", inputs, weights, out, flops=_flops(inputs, weights), unit="matrix")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weights = ctx.saved_tensors
        grad_inputs = _output(grad, *inputs.shape) if ctx.needs_input_grad[0] else None
        grad_weights = torch.empty_like(weights) if ctx.needs_input_grad[1] else None
        flops = _flops(inputs, weights)
        if grad_inputs is not None:
            note_kernel("grouped_mm", grad, weights, grad_inputs, flops=flops, unit="matrix")
        if grad_weights is not None:
            note_kernel("grouped_mm", grad, inputs, grad_weights, flops=flops, unit="matrix")
        return grad_inputs, grad_weights


def _flops(inputs: Tensor, weights: Tensor) -> int:
    """Count the FLOPs: each of the S pairs is multiplied with one expert's weights."""
    return 2 * inputs.shape[0] * weights.shape[1] * weights.shape[2]


def _output(like: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate an output whose rows start at multiples of 16 bytes."""
    width = round_up(columns, 16 // like.element_size())
    return like.new_empty_strided((rows, columns), (width, 1))  # no view: biases are added in place


_rms_norm = functional.rms_norm


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Stand in for rms_norm; with a weight of another dtype PyTorch takes the plain operators on CUDA, too."""
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, list(normalized_shape), weight, eps)
    if torch.is_autocast_enabled("cpu"):
        input, weight = input.float(), None if weight is None else weight.float()
    out: Tensor = _Fused.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    """Stand in for aten::_fused_rms_norm, which keeps the reciprocal root mean squares in fp32."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        kept = input.shape[: input.dim() - num_dims]
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        reciprocal = input.new_empty((*kept, *[1] * num_dims), dtype=torch.float32)
        note_kernel("fused_rms_norm", input, out)
        ctx.save_for_backward(input, weight, reciprocal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        note_kernel("fused_rms_norm_backward", input, grad, grad)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return torch.empty_like(grad), None, grad_weight


_INDEX = 8  # bytes of an int64


def cuda_temporaries(operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the temporary bytes of a call of this operator, by name such as "aten::sort"."""
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, kwargs)


def _embedding_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow embedding_dense_backward_cuda, embedding_backward_cuda_kernel (Embedding.cu, EmbeddingBackwardKernel.cu).

    More than 3,072 indices are sorted, and the rows of each token are added up in parts of ten; space is allocated for
    the most parts that there can be.
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
    """Follow sort_cuda_kernel and launch_stable_sort_kernel (SortStable.cu, Sort.cu).

    Rows of up to 4,096 are sorted in place. Longer ones are sorted by cub: a single row takes its indices and a second
    copy of both; several rows take pairs of row and index, twice, the values and cub's second copy of them.
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
    """Follow should_use_sort (TensorTopK.cpp): up to ten rows of 100,000 or more are sorted whole."""
    values: Tensor = args[0]
    row = values.shape[-1] if values.dim() else 1
    if row < 100_000 or values.numel() // row > 10:
        return 0
    return values.numel() * (values.element_size() + _INDEX) + _sort((values,), {})


def _multinomial(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow multinomial (Distributions.cpp): a draw divides the probabilities by exponential noise of their shape."""
    probabilities: Tensor = args[0]
    return probabilities.numel() * probabilities.element_size()


def _safe_softmax(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow _safe_softmax (SoftMax.cpp): softmax and a mask of minus infinities are there before the result."""
    scores: Tensor = args[0]
    return scores.numel() * (scores.element_size() + 1)


def _index_put(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow index_put_with_sort_kernel (Indexing.cu): to add to repeated places it sorts linear indices."""
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulates:
        return 0
    shapes = [each.shape for each in args[1] if each is not None]
    count = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return _INDEX * 6 * count  # linear, its order, both sorted, and cub's second copy of both


def _foreach_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow foreach_tensor_norm_cuda (ForeachReduceOp.cu): a partial norm per 65,536 elements of the longest one."""
    tensors: Sequence[Tensor] = args[0]
    longest = max((each.numel() for each in tensors), default=0)
    return _accumulated(tensors[0]) * len(tensors) * -(-longest // 65536) if tensors else 0


def _int8_dequantized(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Follow int8_vectorwise_dequant (_ops.py of bitsandbytes): weight times scales in fp32, before the result."""
    weight: Tensor = args[0]
    return 4 * weight.numel()


def _accumulated(tensor: Tensor) -> int:
    """Return the bytes of an element in the dtype that sums are kept in."""
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
