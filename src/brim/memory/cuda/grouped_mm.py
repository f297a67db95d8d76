"""`torch.nn.functional.grouped_mm`, the product of each expert's tokens with its weights.

After _grouped_mm_cuda in aten/src/ATen/native/cuda/GroupedBlas.cpp and create_grouped_gemm_output_tensor in
aten/src/ATen/native/GroupedMMUtils.h of PyTorch: one output, on every GPU from sm80 on, in half precision and fp32
(the rules for fake tensors know bf16 alone). Legend: S pairs of a token and an expert, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.memory.cuda.flash_kernel import round_up
from brim.memory.recorder import note_kernel


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Inputs [S, inputs] times weights [E, inputs, outputs]: [S, outputs]."""
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
    """Each of the S pairs meets one expert."""
    return 2 * inputs.shape[0] * weights.shape[1] * weights.shape[2]


def _output(like: Tensor, rows: int, columns: int) -> Tensor:
    """Rows start at multiples of 16 bytes."""
    width = round_up(columns, 16 // like.element_size())
    return like.new_empty_strided((rows, columns), (width, 1))  # no view: biases are added in place
