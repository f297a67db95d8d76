"""Predict what the flash-attn package (2.x) allocates, function by function.

It follows flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention, release
2.8.3; since 2.6.2 the log-sum-exp of rows of different lengths is kept without padding (pull request 970). Legend: B
rows, H query heads, K key and value heads, T queries, S keys, N tokens of all rows, D head dimension. Values are not
computed: shapes, dtypes, layouts and lifetimes are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from brim.memory.cuda.attention import flash_backward, note_attention, round_up, split_buffers
from brim.memory.cuda.target import CudaTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnPackage:
    """Provide the functions that transformers takes from the package."""

    target: CudaTarget

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Return the attention of q [B, T, H, D] over k and v [B, S, K, D]."""
        return _apply(_Fixed, q, k, v, dropout_p, self.target)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of q [N, H, D] over k and v [N, K, D], rows one after the other."""
        return _apply(_Varlen, q, k, v, cu_seqlens_q)

    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse attention over a paged cache, which brim does not use."""
        raise NotImplementedError


def _apply(function: type[torch.autograd.Function], q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    """Run the function on tensors whose last dimension has stride 1, which are copied where it has not."""
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    out: Tensor = function.apply(q, k, v, *rest)  # type: ignore[no-untyped-call]
    return out


class _Fixed(torch.autograd.Function):
    """Stand in for FlashAttnFunc."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float, target: CudaTarget) -> Tensor:
        q, k, v, width = _padded(q, k, v)
        rows, queries, heads, head_dim = q.shape
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((rows, heads, queries), dtype=torch.float32)
        split = split_buffers(rows, heads, queries, k.shape[1], head_dim, dropout=dropout, like=q, target=target)
        rng_state = q.new_empty((2,), dtype=torch.int64)
        del split
        note_attention("flash_attention", *(each.transpose(1, 2) for each in (q, k, v)), out)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, rng_state)
        return out[..., :width] if width != head_dim else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, _, _ = ctx.saved_tensors
        width, head_dim = grad.shape[-1], q.shape[-1]
        grad = _widened(grad, head_dim)
        grads = flash_backward(grad, q, k, v, out, rounded_dim=_rounded(head_dim))
        return (*(each[..., :width] if width != head_dim else each for each in grads), None, None)


class _Varlen(torch.autograd.Function):
    """Stand in for FlashAttnVarlenFunc."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v, width = _padded(q, k, v)
        tokens, heads, head_dim = q.shape
        rows = cu_seqlens.shape[0] - 1
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((heads, tokens), dtype=torch.float32)
        rng_state = q.new_empty((2,), dtype=torch.int64)
        note_attention("flash_attention", *_by_row(rows, q, k, v), out)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, cu_seqlens, rng_state)
        ctx.rows = rows
        return out[..., :width] if width != head_dim else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, _, _ = ctx.saved_tensors
        width, head_dim = grad.shape[-1], q.shape[-1]
        grad = _widened(grad, head_dim)
        tokens, heads, _ = q.shape
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        spaced = tokens + 128 * ctx.rows  # rows stand at least a block of 128 queries apart
        softmax_d = q.new_empty((heads, spaced), dtype=torch.float32)
        dq_accum = q.new_empty((spaced, heads, _rounded(head_dim)), dtype=torch.float32)
        if k.shape[1] != heads:
            dk_expanded = q.new_empty((k.shape[0], heads, head_dim))
            dv_expanded = q.new_empty((k.shape[0], heads, head_dim))
            del dk_expanded, dv_expanded
        by_row = _by_row(ctx.rows, q, k, v)
        note_attention("flash_attention_backward", *by_row, grad, dq, dk, dv, dq_accum, backward=True)
        del softmax_d, dq_accum
        grads = (dq, dk, dv)
        return (*(each[..., :width] if width != head_dim else each for each in grads), None)


def _by_row(rows: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield each tensor [N, H, D] as [B, H, T, D] as far as its shape goes, as if all rows were of equal length."""
    for tensor in tensors:
        tokens, heads, width = tensor.shape
        yield tensor[: tokens // rows * rows].view(rows, tokens // rows, heads, width).transpose(1, 2)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pad head dimensions to a multiple of 8; return the tensors and the width before."""
    width = q.shape[-1]
    if width % 8:
        q, k, v = (pad(each, (0, 8 - width % 8)) for each in (q, k, v))
    return q, k, v, width


def _widened(grad: Tensor, head_dim: int) -> Tensor:
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return pad(grad, (0, head_dim - grad.shape[-1])) if grad.shape[-1] != head_dim else grad


def _rounded(head_dim: int) -> int:
    """Return the width of an accumulated row."""
    return round_up(head_dim, 32) if head_dim <= 192 else 256
