"""Rebuild AutoGPTQ's 4-bit layers (Triton, second version) as the allocator sees them.

After qlinear_tritonv2.py and triton_utils/dequant.py of the plugin accelerated-peft of fms-acceleration at 24bdadb.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PACKED = 8  # 4-bit numbers in an int32


class GptqLinear(nn.Linear):
    """Stand for a quantised layer, which PEFT wraps as a linear one."""

    def __init__(self, in_features: int, out_features: int, *, group_size: int | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        groups = in_features // (group_size or in_features)
        packed = torch.empty(in_features // _PACKED, out_features, dtype=torch.int32)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("qzeros", torch.empty(groups, out_features // _PACKED, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(groups, out_features, dtype=torch.float16))
        self.register_buffer("g_idx", torch.empty(in_features, dtype=torch.int32))

    def forward(self, input: Tensor) -> Tensor:
        """Do as QuantLinearFunction: the weight is in fp16 for the time of a product, forward and backward."""
        output: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: GptqLinear) -> Tensor:
        ctx.layer = layer
        return torch.matmul(inputs, dequantize_gptq(layer).t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.matmul(gradients[0], dequantize_gptq(ctx.layer)), None


def dequantize_gptq(layer: Any) -> Tensor:
    """Do as dequant248: return the weight in fp16."""
    return torch.empty((layer.out_features, layer.in_features), dtype=torch.float16)


def quantize_gptq(model: nn.Module, group_size: int | None) -> None:
    """Put such layers in the place of all linear ones but the head."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            layer = GptqLinear(module.in_features, module.out_features, group_size=group_size)
            model.set_submodule(name, layer.to(module.weight.device))
