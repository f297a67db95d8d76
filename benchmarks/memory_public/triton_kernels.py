"""Rebuild Triton's RMSNorm and rotary embedding of fms-acceleration as the allocator sees them.

After kernels/unsloth/rms_layernorm.py and rope_embedding.py of the plugin fused-ops-and-kernels at 24bdadb.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """Fast_RMS_Layernorm: the gradient takes the place of the output's; the weight gets none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        rows = inputs.view(-1, inputs.shape[-1])
        output = torch.empty_like(rows)
        inverse = inputs.new_empty(rows.shape[0], dtype=torch.float32)
        ctx.save_for_backward(rows, weight, inverse)
        return output.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """Take the place of a norm's forward."""
    output: Tensor = RMSNorm.apply(hidden_states, module.weight)  # type: ignore[no-untyped-call]
    return output


class _Rotary(torch.autograd.Function):
    """Do as Fast_RoPE_Embedding: write over the input, forward and backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, heads, head_dim = states.shape
        flat = states.view(rows * tokens, heads * head_dim)
        ctx.cos, ctx.sin = cos, sin
        return flat.view(rows, tokens, heads, head_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        rows, tokens, heads, head_dim = gradient.shape
        flat = gradient.reshape(rows * tokens, heads * head_dim)  # a copy where the layout asks for one
        return flat.view(rows, tokens, heads, head_dim), None, None


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Take the place of apply_rotary_pos_emb: [B, H, T, D]."""
    turned = [_Rotary.apply(each.transpose(1, 2), cos, sin).transpose(1, 2) for each in (query, key)]  # type: ignore[no-untyped-call]
    return turned[0], turned[1]
