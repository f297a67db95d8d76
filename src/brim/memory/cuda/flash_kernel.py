"""What FlashAttention allocates as PyTorch's own SDPA kernel.

After aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_fwd, mha_bwd), attention.cu and
attention_backward.cu of PyTorch. Legend: B rows, H query heads, K key and value heads, T queries, S keys, D head
dimension, a multiple of 8. Values are not computed: shapes, dtypes, layouts and lifetimes are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.memory.cuda.attention_work import note_attention
from brim.memory.cuda.split_keys import split_buffers
from brim.memory.cuda.target import CudaTarget


class FlashKernel(torch.autograd.Function):
    """aten::_scaled_dot_product_flash_attention on tensors [B, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, target: CudaTarget) -> Tensor:
        q = query.transpose(1, 2)
        rows, queries, heads, head_dim = q.shape
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((rows, heads, queries), dtype=torch.float32)
        split = split_buffers(rows, heads, queries, key.shape[2], head_dim, dropout=dropout, like=q, target=target)
        rng_state = q.new_empty((2,), dtype=torch.int64)  # uint64 on the device, with and without dropout
        unused = q.new_empty((), dtype=torch.int64)
        del split
        attention = out.transpose(1, 2)
        note_attention("flash_attention", query, key, value, attention)
        ctx.save_for_backward(query, key, value, attention, log_sum_exp, rng_state, unused)
        ctx.target = target
        return attention

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attention, _, _, _ = ctx.saved_tensors
        grads = flash_backward(
            grad.transpose(1, 2).contiguous(),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention.transpose(1, 2).contiguous(),
            rounded_dim=rounded_head_dim(query.shape[-1]),
            target=ctx.target,
        )
        return (*(each.transpose(1, 2) for each in grads), None, None)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, rounded_dim: int, target: CudaTarget
) -> tuple[Tensor, Tensor, Tensor]:
    """mha_bwd: the gradients of q [B, T, H, D], k and v [B, S, K, D]."""
    rows, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1], k.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rounded = round_up(queries, 128)
    softmax_d = q.new_empty((rows, heads, rounded), dtype=torch.float32)
    accumulated = (rows, rounded, heads, rounded_dim)
    dq_accum = q.new_empty((*_splits(rows * heads, target), *accumulated), dtype=torch.float32)
    if key_heads != heads:
        dk_expanded = q.new_empty((rows, keys, heads, head_dim))
        dv_expanded = q.new_empty((rows, keys, heads, head_dim))
        del dk_expanded, dv_expanded
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    note_attention("flash_attention_backward", *heads_first, grad, out, dq, dk, dv, dq_accum, backward=True)
    del softmax_d, dq_accum
    return dq, dk, dv


def rounded_head_dim(head_dim: int) -> int:
    """The width of an accumulated row in PyTorch's copy of the kernel."""
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _splits(blocks: int, target: CudaTarget) -> tuple[int, ...]:
    """The leading dimension of dq_accum: one accumulator a split where the order of additions must be fixed."""
    if not target.deterministic:
        return ()
    return (-(-(target.multiprocessors or 1) // blocks),)
