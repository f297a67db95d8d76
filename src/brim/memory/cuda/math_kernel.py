"""Scaled dot-product attention in plain operators, as CUDA runs it where no fused kernel can.

After _scaled_dot_product_attention_math in aten/src/ATen/native/transformers/attention.cpp of PyTorch. It is written
out here since PyTorch's own adds the mask out of place where a tensor is traced, which costs one more score matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    """Attention [B, H, T, D], all between in fp32 for half-precision inputs."""
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
    """convert_boolean_attn_mask: 0 where attention may look, minus infinity elsewhere."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))
