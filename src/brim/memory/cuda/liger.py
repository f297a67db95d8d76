"""Stand in for Liger's kernels, which are Triton's and take no fake tensors: the same allocations, kept the same time.

They follow LigerRMSNormFunction (ops/rms_norm.py), LigerSiLUMulFunction (ops/swiglu.py) and LigerRopeFunction
(ops/rope.py) of liger-kernel 0.8.5, as brim calls them, on one device. Values are not computed. The classes have
Liger's names, by which the adapter function knows a product whose factors are kept.

Legend: N tokens of all rows, B rows, T tokens of a row, H query or key heads, D features or head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brim.memory.cuda.attention import CudaTarget
from brim.memory.trace import note_kernel
from brim.models.kernels import Kernels

_MULTIPROCESSORS = 132  # of an H100, where the target's are not known


def liger_stand_ins(target: CudaTarget | None) -> Kernels:
    """Return functions that allocate and keep on fake tensors what Liger's do on the target."""
    num_partial = (target and target.multiprocessors) or _MULTIPROCESSORS

    def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, casting: str) -> Any:
        return LigerRMSNormFunction.apply(x, weight, num_partial)  # type: ignore[no-untyped-call]

    return Kernels(norm=norm, gate=LigerSiLUMulFunction.apply, rotate=LigerRopeFunction.apply)


class LigerRMSNormFunction(torch.autograd.Function):
    """Keep the input [..., D] and a number in fp32 for each token; its gradient is a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, num_partial: int) -> Tensor:
        x, shape = x.contiguous(), x.shape
        x = x.view(-1, shape[-1])
        out = torch.empty_like(x)
        reciprocal = x.new_empty(x.shape[0], dtype=torch.float32)
        note_kernel("liger_rms_norm", x, out)
        ctx.save_for_backward(x, weight.contiguous(), reciprocal)
        ctx.num_partial = num_partial
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        grad, shape = grad.contiguous(), grad.shape
        grad = grad.view(-1, shape[-1])
        # A sum of each multiprocessor's rows.
        needs_weight = ctx.needs_input_grad[1]
        partial = weight.new_empty((ctx.num_partial, shape[-1]), dtype=torch.float32) if needs_weight else None
        of_x = torch.zeros_like(grad)
        note_kernel("liger_rms_norm_backward", x, grad, of_x)
        of_weight = None if partial is None else partial.sum(dim=0).to(weight.dtype)
        return of_x.view(shape), of_weight, None


class LigerSiLUMulFunction(torch.autograd.Function):
    """Keep both factors, and write their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up, shape = gate.contiguous(), up.contiguous(), gate.shape
        gate, up = gate.view(-1, shape[-1]), up.view(-1, shape[-1])
        out = torch.empty_like(gate)
        note_kernel("liger_swiglu", gate, up, out)
        ctx.save_for_backward(gate, up)
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        note_kernel("liger_swiglu_backward", grad, gate, up, gate, up)
        return gate.view(grad.shape), up.view(grad.shape)


class LigerRopeFunction(torch.autograd.Function):
    """Write over query and key [B, H, T, D] where a token's heads lie behind one another, else over copies of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        note_kernel("liger_rope", query, query, key, key, cos, sin)
        ctx.save_for_backward(cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_query, of_key = of_query.transpose(1, 2).contiguous(), of_key.transpose(1, 2).contiguous()
        note_kernel("liger_rope_backward", of_query, of_query, of_key, of_key, cos, sin)
        return of_query.transpose(1, 2), of_key.transpose(1, 2), None, None
