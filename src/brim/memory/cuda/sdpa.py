"""Run `scaled_dot_product_attention` on fake tensors as CUDA would run it.

It follows scaled_dot_product_attention in aten/src/ATen/native/transformers/attention.cpp of PyTorch.

`choose` says which kernel runs, after `select_sdp_backend` of PyTorch
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and transformers/sdp_utils_cpp.h), torch 2.10 to 2.13, dense
tensors, no backend disabled by the user. Legend: B rows, H query heads, K key and value heads, T queries, S keys, D
head dimension.

`math_attention` is attention in plain operators, as CUDA runs it where no fused kernel can: after
_scaled_dot_product_attention_math in the same attention.cpp. It is written out here since PyTorch's own adds the mask
out of place where a tensor is traced, which costs one more score matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from brim.memory.cuda.attention import CudaTarget, CudnnKernel, EfficientKernel, FlashKernel, record_answers


def sdpa(
    target: CudaTarget,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for PyTorch's function, whose arguments follow the first."""
    query, key, value, *masks = _lowered(query, key, value, *([] if attn_mask is None else [attn_mask]))
    attn_mask = masks[0] if masks else None
    options: dict[str, Any] = {"is_causal": is_causal, "dropout": dropout_p, "enable_gqa": enable_gqa}
    call = attention_of(query, key, value, attn_mask, **options)
    kernel = choose(call, target)
    with torch.autocast(query.device.type, enabled=False):
        if kernel == "math":
            return math_attention(query, key, value, attn_mask, scale=scale, **options)
        mask = None if attn_mask is None else additive(attn_mask, query.dtype)
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, target)
        trains = call.needs_gradient
        if kernel == "cudnn":
            return _apply(CudnnKernel, query, key, value, mask, trains)
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return _apply(EfficientKernel, query, key, value, mask, dropout_p, target, trains)


def _lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the inputs of attention as autocast would; the stand-in runs before PyTorch's dispatch could do it."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    low = torch.get_autocast_dtype("cpu")
    return tuple(each.to(low) if each.is_floating_point() and each.dtype != torch.float64 else each for each in tensors)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, target: CudaTarget) -> Tensor:
    """Run FlashAttention; head dimensions are padded to multiples of 8, each tensor on its own."""
    width = query.shape[-1]
    if width % 8:
        query, key, value = (pad(each, (0, 8 - width % 8)) for each in (query, key, value))
    out = _apply(FlashKernel, query, key, value, dropout, target)
    return out[..., :width] if width % 8 else out


def _aligned(mask: Tensor) -> Tensor:
    """Copy a mask of other strides, since the kernel reads rows of 8 elements (preprocess_mask)."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return pad(mask, (0, 8 - last % 8))[..., :last]


def _apply(kernel: type[torch.autograd.Function], *arguments: object) -> Tensor:
    out: Tensor = kernel.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return the attention [B, H, T, D]; for half-precision inputs all that lies between is in fp32."""
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(abs(scale) if scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * root
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = additive(mask, query.dtype)
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores.add_(mask)
    weights = torch._safe_softmax(scores, -1)
    if dropout > 0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    return torch.matmul(weights, value).to(dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a boolean mask additive: 0 where attention may look, else minus infinity (convert_boolean_attn_mask)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


Kernel: TypeAlias = Literal["flash", "efficient", "cudnn", "math"]


_HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Describe a call as far as the choice of a kernel depends on it."""

    query: tuple[int, ...]  # [B, H, T, D]
    key: tuple[int, ...]  # [B, K, S, D]
    value: tuple[int, ...]  # [B, K, S, D of the values]
    dtype: torch.dtype
    same_dtype: bool = True  # of query, key and value
    mask: tuple[int, ...] | None = None
    mask_needs_gradient: bool = False
    mask_stride: int = 1  # of its last dimension
    needs_gradient: bool = False
    is_causal: bool = False
    enable_gqa: bool = False
    dropout: float = 0.0
    last_strides: tuple[int, int, int] = (1, 1, 1)

    @property
    def is_4d(self) -> bool:
        """Return whether the tensors have rows, heads, tokens and head dimension, as the fused kernels need them."""
        return len(self.query) == len(self.key) == len(self.value) == 4


def attention_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    dropout: float,
    enable_gqa: bool,
) -> Attention:
    """Describe a call with these tensors as far as the choice of a kernel depends on it."""
    return Attention(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=query.dtype,
        same_dtype=query.dtype == key.dtype == value.dtype,
        mask=None if mask is None else tuple(mask.shape),
        mask_needs_gradient=mask is not None and mask.requires_grad,
        mask_stride=1 if mask is None else mask.stride(-1),
        needs_gradient=torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)),
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        dropout=dropout,
        last_strides=(query.stride(-1), key.stride(-1), value.stride(-1)),
    )


@record_answers
def choose(call: Attention, target: CudaTarget) -> Kernel:
    """Return the first kernel, in the order of preference, that can run the call."""
    order: list[Kernel] = ["flash", "efficient"]
    if _prefers_cudnn(target):
        order.insert(0, "cudnn")
    can = {"flash": _flash_can, "efficient": _efficient_can, "cudnn": _cudnn_can}
    return next((kernel for kernel in order if can[kernel](call, target)), "math")


def _prefers_cudnn(target: CudaTarget) -> bool:
    """Follow check_prefer_cudnn_attention: cuDNN above 9.15.0 comes first on data-centre Hopper and Blackwell.

    The rule is in PyTorch 2.10 already, but its wheels carry an older cuDNN; those from 2.11 on carry a newer one
    (huggingface/transformers#48163).
    """
    return target.torch_version >= (2, 11) and target.compute_capability in ((9, 0), (10, 0), (10, 3))


def _flash_can(call: Attention, target: CudaTarget) -> bool:
    head_dim = call.query[-1]
    return (
        call.is_4d
        and call.mask is None
        and head_dim == call.key[-1] == call.value[-1] <= 256
        and 80 <= target.sm <= 121
        and not _flash_backward_lacks(call, target)
        and (call.query[-2] == call.key[-2] or not call.is_causal)
        and _half_on(call, target)
        and _heads_fit(call, gqa=True)
        and _has_tokens(call)
        and (call.last_strides == (1, 1, 1) or head_dim == 1)
    )


def _flash_backward_lacks(call: Attention, target: CudaTarget) -> bool:
    """Follow check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    if not call.needs_gradient or not (86 <= target.sm <= 89 or 120 <= target.sm <= 121):
        return False
    head_dim = call.query[-1]
    return 192 < head_dim <= 224 or (head_dim > 224 and call.dropout > 0)


def _efficient_can(call: Attention, target: CudaTarget) -> bool:
    alignment = _gemm_alignment(call, target)
    dims = (call.query[-1], call.value[-1])
    return (
        call.is_4d
        and 50 <= target.sm <= 121
        and call.query[-1] == call.key[-1]
        and all(dim > 0 and dim % alignment == 0 for dim in dims)
        and _has_tokens(call)
        and call.last_strides == (1, 1, 1)
        and (call.mask is None or call.mask_stride == 1)
        and _heads_fit(call, gqa=target.torch_version >= (2, 14))  # grouped queries: pytorch/pytorch#191085
        and call.same_dtype
        and call.dtype in (torch.float16, torch.float32, *([torch.bfloat16] if target.sm >= 80 else []))
    )


def _gemm_alignment(call: Attention, target: CudaTarget) -> int:
    """Return the alignment in elements (minimum_gemm_alignment)."""
    half = call.dtype in _HALF_DTYPES
    tensor_cores = target.sm >= 80 or (target.sm >= 70 and half)
    alignment = 4 if target.sm >= 80 else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _cudnn_can(call: Attention, target: CudaTarget) -> bool:
    return (
        call.is_4d
        and _half_on(call, target)
        and _cudnn_takes_mask(call)
        and 80 <= target.sm <= 121
        and _has_tokens(call)
        and call.last_strides == (1, 1, 1)
        and (call.mask is None or call.mask_stride == 1)
        and _heads_fit(call, gqa=True, same_kv=False)
        and _cudnn_takes_shapes(call, target)
    )


def _cudnn_takes_shapes(call: Attention, target: CudaTarget) -> bool:
    """Follow check_cudnn_tensor_shapes: head dimensions go up to 256 on Hopper from cuDNN 9.10 on."""
    limit = 256 if target.compute_capability == (9, 0) else 128
    dims = (call.query[-1], call.value[-1])
    one_query_with_dropout = call.query[-2] == 1 and call.dropout > 0
    return all(dim <= limit and dim % 8 == 0 for dim in dims) and call.key[-2] != 1 and not one_query_with_dropout


def _cudnn_takes_mask(call: Attention) -> bool:
    """Follow check_attn_mask_shape."""
    if call.mask is None:
        return True
    if call.mask_needs_gradient or len(call.mask) not in (2, 4):
        return False
    rows, heads, queries, _ = call.query
    full = (rows, heads, queries, call.key[-2])[-len(call.mask) :]
    return all(size in (1, expected) for size, expected in zip(call.mask, full, strict=True))


def _half_on(call: Attention, target: CudaTarget) -> bool:
    allowed = _HALF_DTYPES if target.sm >= 80 else (torch.float16,)
    return call.same_dtype and call.dtype in allowed


def _has_tokens(call: Attention) -> bool:
    return call.query[-2] > 0 and call.key[-2] > 0


def _heads_fit(call: Attention, *, gqa: bool, same_kv: bool = True) -> bool:
    """Follow check_batch_size_and_num_heads_dense."""
    if not call.query[0] == call.key[0] == call.value[0]:
        return False
    heads, keys, values = call.query[1], call.key[1], call.value[1]
    if call.enable_gqa and gqa:
        return heads % keys == 0 and heads % values == 0 and (keys == values or not same_kv)
    return heads == keys == values
