"""What the memory-efficient kernel (CUTLASS, from xFormers) allocates as PyTorch's SDPA.

After attention.cu (_efficient_attention_forward), attention_backward.cu and mem_eff_attention/kernel_backward.h of
PyTorch. Legend: B rows, H heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.memory.cuda.attention_work import note_attention
from brim.memory.cuda.efficient_workspace import workspace_bytes
from brim.memory.cuda.flash_kernel import round_up
from brim.memory.cuda.target import CudaTarget


class EfficientKernel(torch.autograd.Function):
    """aten::_scaled_dot_product_efficient_attention on tensors [B, H, T, D]; the bias is [B, H, T, S]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        dropout: float,
        target: CudaTarget,
        trains: bool,
    ) -> Tensor:
        rows, heads, queries, _ = query.shape
        width = value.shape[-1]
        out = query.new_empty((rows, queries, heads, width))
        kept = round_up(queries, 32) if trains else 0
        log_sum_exp = query.new_empty((rows, heads, kept), dtype=torch.float32)
        if width > 128 and query.dtype != torch.float32:  # the output does not stay in registers: kernel_forward.h
            accumulated = query.new_empty((rows, queries, heads, width), dtype=torch.float32)
            del accumulated
        attention = out.transpose(1, 2)
        note_attention("efficient_attention", query, key, value, attention, bias=bias)
        ctx.save_for_backward(query, key, value, bias, attention, log_sum_exp)
        ctx.dropout, ctx.target = dropout, target
        return attention

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, attention, _ = ctx.saved_tensors
        grad_out = grad.transpose(1, 2).contiguous()
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        grad_bias = _gradient_of(bias) if ctx.needs_input_grad[3] else None
        delta = _delta(grad_out, attention.transpose(1, 2))
        size = workspace_bytes(
            rows=q.shape[0],
            heads=q.shape[2],
            queries=q.shape[1],
            keys=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
            dropout=ctx.dropout > 0,
            target=ctx.target,
        )
        workspace = q.new_empty((size,), dtype=torch.uint8) if size else None
        note_attention(
            "efficient_attention_backward", query, key, value, grad, attention, dq, dk, dv, bias=bias, backward=True
        )
        del delta, workspace
        return (*(each.transpose(1, 2) for each in (dq, dk, dv)), grad_bias, None, None, None)


def _gradient_of(bias: Tensor) -> Tensor:
    """Its last dimension is padded to 16 elements."""
    *sizes, last = bias.shape
    return bias.new_empty((*sizes, round_up(last, 16)))[..., :last]


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Row sums of gradient × output, fp32 [B, H, T]: the half-precision kernels compute it, for fp32 PyTorch does."""
    if grad_out.dtype == torch.float32:
        return (grad_out * out).sum(-1).transpose(-2, -1).contiguous()
    rows, queries, heads, _ = grad_out.shape
    return grad_out.new_empty((rows, heads, queries), dtype=torch.float32)
