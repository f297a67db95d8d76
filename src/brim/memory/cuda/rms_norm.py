"""`torch.nn.functional.rms_norm`, which CUDA runs as one kernel and the CPU in plain operators.

After rms_norm_symint in aten/src/ATen/native/layer_norm.cpp and _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu of
PyTorch. transformers' own RMSNorm modules are plain operators on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from brim.memory.recorder import note_kernel

_rms_norm = functional.rms_norm


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The stand-in; with a weight of another dtype PyTorch takes the plain operators on CUDA, too."""
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, list(normalized_shape), weight, eps)
    if torch.is_autocast_enabled("cpu"):
        input, weight = input.float(), None if weight is None else weight.float()
    out: Tensor = _Fused.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    """aten::_fused_rms_norm: it keeps the reciprocal root mean squares in fp32."""

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
