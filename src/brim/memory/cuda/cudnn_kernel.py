"""What cuDNN's attention allocates as PyTorch's SDPA.

After attention.cu, attention_backward.cu and native/cudnn/MHA.cpp of PyTorch. cuDNN's workspace comes from the
caching allocator: its front end (cudnn_frontend/node/scaled_dot_product_flash_attention.h, get_fe_workspace_size_node)
asks for dQ in fp32 and the row sums in the backward pass. What the closed library adds is not published: for grouped
queries one full-headed dK and dV is taken for it, which its reduction over the group reads.
Legend: B rows, H query heads, K key and value heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.memory.cuda.attention_work import note_attention


class CudnnKernel(torch.autograd.Function):
    """aten::_scaled_dot_product_cudnn_attention on tensors [B, H, T, D]; the bias is expanded, not copied."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, trains: bool) -> Tensor:
        rows, heads, queries, _ = query.shape
        seed = query.new_empty((), dtype=torch.int64)  # on the device, with and without dropout
        offset = query.new_empty((), dtype=torch.int64)
        out = like_layout_of(query, value.shape[-1])
        note_attention("cudnn_attention", query, key, value, out, bias=bias)
        if trains:
            log_sum_exp = query.new_empty((rows, heads, queries, 1), dtype=torch.float32)
            ctx.save_for_backward(query, key, value, bias, out, log_sum_exp, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, _, _, _ = ctx.saved_tensors
        rows, heads, queries, head_dim = query.shape
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        grad_out = grad if grad.stride(-1) == 1 else torch.empty_like(out)
        size = 4 * rows * heads * queries * (head_dim + 1)
        if key.shape[1] != heads:
            size += query.element_size() * rows * heads * key.shape[2] * (head_dim + value.shape[-1])
        workspace = query.new_empty((size,), dtype=torch.uint8)
        note_attention("cudnn_attention_backward", query, key, value, grad, out, dq, dk, dv, bias=bias, backward=True)
        del workspace, grad_out
        return dq, dk, dv, None, None


def like_layout_of(query: Tensor, width: int) -> Tensor:
    """alloc_with_matching_layout: [B, H, T, width], its dimensions in the order in memory of the query's."""
    shape = (*query.shape[:-1], width)
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda dim: query.stride(dim) or float("inf"))
    strides, step = [0] * 4, 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)
