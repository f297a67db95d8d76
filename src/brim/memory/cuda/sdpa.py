"""`scaled_dot_product_attention` as CUDA would run it, on fake tensors.

After scaled_dot_product_attention in aten/src/ATen/native/transformers/attention.cpp of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from brim.memory.cuda.cudnn_kernel import CudnnKernel
from brim.memory.cuda.efficient_kernel import EfficientKernel
from brim.memory.cuda.flash_kernel import FlashKernel
from brim.memory.cuda.math_kernel import additive, math_attention
from brim.memory.cuda.sdpa_choice import attention_of, choose
from brim.memory.cuda.target import CudaTarget


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
    """The stand-in; its arguments after the first are PyTorch's."""
    query, key, value, *masks = _lowered(query, key, value, *([] if attn_mask is None else [attn_mask]))
    attn_mask = masks[0] if masks else None
    call = attention_of(query, key, value, attn_mask, is_causal=is_causal, dropout=dropout_p, enable_gqa=enable_gqa)
    kernel = choose(call, target)
    with torch.autocast(query.device.type, enabled=False):
        if kernel == "math":
            return math_attention(
                query,
                key,
                value,
                attn_mask,
                dropout=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        mask = None if attn_mask is None else additive(attn_mask, query.dtype)
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, target)
        trains = call.needs_gradient
        if kernel == "cudnn":
            return _of(CudnnKernel, query, key, value, mask, trains)
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return _of(EfficientKernel, query, key, value, mask, dropout_p, target, trains)


def _lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast leaves the inputs of attention; this runs before PyTorch's dispatch could."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    low = torch.get_autocast_dtype("cpu")
    return tuple(each.to(low) if each.is_floating_point() and each.dtype != torch.float64 else each for each in tensors)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, target: CudaTarget) -> Tensor:
    """Head dimensions are padded to multiples of 8, each tensor on its own."""
    width = query.shape[-1]
    if width % 8:
        query, key, value = (pad(each, (0, 8 - width % 8)) for each in (query, key, value))
    out = _of(FlashKernel, query, key, value, dropout, target)
    return out[..., :width] if width % 8 else out


def _aligned(mask: Tensor) -> Tensor:
    """preprocess_mask: the kernel reads rows of 8 elements, so a mask of other strides is copied."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return pad(mask, (0, 8 - last % 8))[..., :last]


def _of(kernel: type[torch.autograd.Function], *arguments: object) -> Tensor:
    out: Tensor = kernel.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
