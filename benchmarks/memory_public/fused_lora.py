"""Rebuild fms-acceleration's fused LoRA for 4-bit layers in its own operations: what it keeps and frees, and when.

After fused_ops/unsloth_lora/bnb/fast_lora.py (LoRA_QKV, LoRA_W) and utils.py (matmul_lora, fast_dequantize) of the
plugin fused-ops-and-kernels at 24bdadb.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Dequantize = Callable[[nn.Module], Tensor]  # a quantised layer -> its weight, in half precision


def fuse(model: nn.Module, dequantize: Dequantize) -> None:
    """Give each attention's q, k and v one forward, and its output projection another."""
    for module in list(model.modules()):
        names = ("q_proj", "k_proj", "v_proj")
        if all(_is_adapted(getattr(module, name, None)) for name in names):
            projections = [getattr(module, name) for name in names]
            outputs: dict[int, Tensor] = {}
            for position, projection in enumerate(projections):
                projection.forward = MethodType(_taking(position, projections, outputs, dequantize), projection)
        if _is_adapted(getattr(module, "o_proj", None)):
            output: Any = module.o_proj
            output.forward = MethodType(_alone(dequantize), output)


def _is_adapted(module: object) -> bool:
    return isinstance(module, nn.Module) and isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def _taking(
    position: int, projections: list[Any], outputs: dict[int, Tensor], dequantize: Dequantize
) -> Callable[..., Tensor]:
    """The first of three calls computes all three outputs; each takes its own."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if not outputs:
            outputs.update(enumerate(_Projections.apply(inputs, projections, dequantize, *_adapters(projections))))  # type: ignore[no-untyped-call]
        return outputs.pop(position)

    return forward


def _alone(dequantize: Dequantize) -> Callable[..., Tensor]:
    def forward(self: Any, inputs: Tensor) -> Tensor:
        (output,) = _Projections.apply(inputs, [self], dequantize, *_adapters([self]))  # type: ignore[no-untyped-call]
        result: Tensor = output
        return result

    return forward


def _adapters(projections: list[Any]) -> list[Tensor]:
    return [part["default"].weight for each in projections for part in (each.lora_A, each.lora_B)]


class _Projections(torch.autograd.Function):
    """Compute LoRA_QKV for three layers, LoRA_W for one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, projections: list[Any], dequantize: Dequantize, *adapters: Tensor) -> Any:
        outputs, dropped = [], []
        for number, projection in enumerate(projections):
            output, kept = _multiply(inputs, projection, dequantize, *adapters[2 * number : 2 * number + 2])
            outputs.append(output)
            dropped.append(kept)
        ctx.projections, ctx.dequantize = projections, dequantize
        ctx.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        ctx.save_for_backward(inputs, *adapters, *dropped)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.autocast("cpu", dtype=ctx.autocast, enabled=ctx.autocast is not None):  # custom_bwd's doing
            return _backward(ctx, gradients)


def _multiply(
    inputs: Tensor, projection: Any, dequantize: Dequantize, down: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Do as matmul_lora: return the output, and the input after dropout."""
    weight = dequantize(projection.base_layer)
    flat = inputs.view(-1, inputs.shape[-1])
    output = torch.matmul(flat, weight.t())
    del weight
    kept = projection.lora_dropout["default"](flat)
    scale = projection.scaling["default"]
    output += (kept @ down.t().to(inputs.dtype)) @ (scale * up.t().to(inputs.dtype))
    return output.view(*inputs.shape[:-1], -1), kept


def _backward(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Any, ...]:
    count = len(ctx.projections)
    inputs, rest = ctx.saved_tensors[0], ctx.saved_tensors[1:]
    adapters, dropped = rest[: 2 * count], rest[2 * count :]
    flat = inputs.reshape(-1, inputs.shape[-1])
    dtype = flat.dtype
    of_outputs = [each.reshape(-1, each.shape[-1]) for each in gradients]
    of_adapters: list[Tensor] = []
    for number, (gradient, kept) in enumerate(zip(of_outputs, dropped, strict=True)):
        down, up = adapters[2 * number].t(), adapters[2 * number + 1].t()
        of_down = kept.t() @ (gradient @ up.t())
        of_up = (down.t() @ kept.t()) @ gradient
        of_down *= 1.0
        of_up *= 1.0
        of_adapters.extend((of_down.t(), of_up.t()))
    of_inputs = None
    for number, (gradient, kept) in enumerate(zip(of_outputs, dropped, strict=True)):
        down, up = adapters[2 * number].t(), adapters[2 * number + 1].t()
        weight = ctx.dequantize(ctx.projections[number].base_layer)
        if of_inputs is None:
            # Three layers' first product takes the place of their input; a single layer's does not.
            of_inputs = torch.matmul(gradient, weight, out=flat) if count > 1 else gradient @ weight
        else:
            of_inputs += gradient @ weight
        del weight
        of_inputs += (kept != 0) * (gradient @ up.to(dtype).t() @ (1.0 * down.to(dtype).t()))
    assert of_inputs is not None
    return (of_inputs.view(inputs.shape), None, None, *of_adapters)


def dequantize_4bit(layer: Any) -> Tensor:
    """Do as fast_dequantize: return the weight; scales in fp32 are freed at once."""
    weight = torch.empty((layer.out_features, layer.in_features), dtype=layer.compute_dtype)
    scales = torch.empty(layer.absmax.numel(), dtype=torch.float32)
    scales += layer.offset
    del scales
    return weight
