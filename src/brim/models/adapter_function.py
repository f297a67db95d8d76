"""Compute LoRA's update of a linear layer's output in one autograd function, which keeps the layer's input once.

PEFT casts the input of each layer to the adapter's fp32, computes in that, and keeps a copy for each layer, another one
that is dropped out, and its mask. Here products have the dtype of the base layer's, the fp32 weights are cast for each
product anew, the input is kept as it is (layers that read one tensor keep that one), and what is dropped out is found
again in the backward pass, from counters or from bits. An input that is the product of two tensors which autograd keeps
anyway, as that of a gated MLP's last layer is, is not kept, but multiplied again.

PEFT has a seam for other ways to compute (`LoraLayer.lora_variant`): the base layer is called by PEFT, and saving,
merging and turning adapters off stay its own. Legend: N tokens, I and O features of input and output, r rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from brim.models.dropout import Mask, mask_of

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from torch.autograd.graph import Node


def use_adapter_function(model: nn.Module) -> None:
    """Let the LoRA layers of a model compute so, where PEFT's own formula is the plain one over a linear layer.

    All else stays PEFT's: DoRA, biases of adapters, embeddings, convolutions (GPT-2's among them), experts.
    """
    from peft.tuners.lora import LoraLayer

    variant = AdapterVariant()
    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or not _is_plain(layer):
            continue
        for adapter in layer.lora_A:
            if adapter not in layer.lora_variant and not layer.lora_bias[adapter]:
                layer.lora_variant[adapter] = variant
                layer.cast_input_dtype_enabled = False


def _is_plain(layer: LoraLayer) -> bool:
    """Return whether PEFT's layer is one of those over a linear layer of torch or bitsandbytes; it has many more."""
    kind = type(layer)
    of_peft = kind.__module__ in ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")
    is_known = of_peft and kind.__name__ in ("Linear", "Linear4bit", "Linear8bitLt")
    return is_known and isinstance(layer.get_base_layer(), nn.Linear)


class AdapterVariant:
    """Compute what plain LoRA computes, for PEFT's layers: result + dropout(x) Aᵀ Bᵀ scaling."""

    def __init__(self) -> None:
        self._cast = _Cast()

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """Return the layer's output. x: [..., I]. result: the base layer's [..., O], which may be overwritten."""
        mask, scale = mask_of(module.lora_dropout[active_adapter], x)
        scale *= module.scaling[active_adapter]
        dtype = _dtype_of_products(x)
        kept = x if x.dtype == dtype else self._cast.of(x, dtype)
        product = x.grad_fn if kept is x and _is_kept_in_factors(x) else None
        down, up = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        if mask is None and not torch.is_grad_enabled():  # a token at a time, the function's own cost counts
            return result + linear(linear(kept, down.to(dtype)), up.to(dtype)).mul_(scale).to(result.dtype)
        is_free = not module.get_base_layer()._forward_hooks  # which may have kept it
        arguments = (result, x, kept, product, down, up, scale, mask, is_free)
        out: Tensor = AdapterFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        return out

    def supports_lora_conversion(self) -> bool:
        """Return True: it is plain LoRA."""
        return True

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Return the merged weight as PEFT computes it, in fp32 where the base's is quantised."""
        return orig_weight + self._delta(module, active_adapter, orig_weight)

    def merge_unsafe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Merge into the weight, as PEFT does."""
        orig_weight.data += module.get_delta_weight(active_adapter)

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Return the weight without the adapter, as PEFT computes it."""
        return orig_weight.data - self._delta(module, active_adapter, orig_weight)

    def _delta(self, module: Any, adapter: str, weight: Tensor) -> Tensor:
        delta: Tensor = module.get_delta_weight(adapter)
        return delta.to(weight.dtype) if module.get_base_layer().weight.is_floating_point() else delta


class AdapterFunction(torch.autograd.Function):
    """Add an adapter's product to the output of its base layer.

    result: [..., O]. x: [..., I], for its gradient. kept: x in the dtype of the products, which it may be already.
    product: the node that multiplied x, whose factors are kept instead; None: there is none. down, up: [r, I] and
    [O, r], in any dtype. mask: of [N, I]; None keeps all of it. is_free: nobody else holds the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        result: Tensor,
        x: Tensor,
        kept: Tensor,
        product: Node | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        mask: Mask | None,
        is_free: bool,
    ) -> Tensor:
        flat, held = kept.reshape(-1, kept.shape[-1]), None
        if mask is not None:
            drawn, held = mask.draw(flat)
            flat = flat * drawn
        hidden = flat @ down.to(kept.dtype).t()
        ctx.save_for_backward(None if product is not None else kept, hidden, held, down, up)
        ctx.product, ctx.scale, ctx.mask, ctx.dtype = product, scale, mask, x.dtype
        # A view's history would be rewritten, at the cost of copies; within bitsandbytes' functions it is refused.
        in_place = is_free and result.is_contiguous() and not result._is_view()
        if in_place:
            ctx.mark_dirty(result)
        out = result.reshape(-1, result.shape[-1])
        wide = up.to(kept.dtype).t()
        if result.dtype != kept.dtype:  # quantised layers under autocast answer in their input's
            update = ((hidden * scale) @ wide).to(result.dtype)
            out = out.add_(update) if in_place else out + update
        elif in_place:
            out.addmm_(hidden, wide, alpha=scale)
        else:
            out = torch.addmm(out, hidden, wide, alpha=scale)
        return result if in_place else out.view(result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, hidden, held, down, up = ctx.saved_tensors
        if kept is None:
            kept = _PRODUCTS[ctx.product.name()](ctx.product)
        _, needs_x, _, _, needs_down, needs_up, _, _, _ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1]).to(kept.dtype)
        of_x = of_down = of_up = None
        if needs_up:
            of_up = (flat.t() @ (hidden * ctx.scale)).to(up.dtype)  # scaled first: 16 bits may not hold the product
        of_hidden = flat @ (up * ctx.scale).to(kept.dtype)
        rows = kept.reshape(-1, kept.shape[-1])
        mask = None if ctx.mask is None else ctx.mask.again(rows, held)
        if needs_down:
            of_down = (of_hidden.t() @ (rows if mask is None else rows * mask)).to(down.dtype)
        if needs_x:
            of_x = of_hidden @ down.to(kept.dtype)
            of_x = (of_x if mask is None else of_x.mul_(mask)).view(*grad.shape[:-1], -1).to(ctx.dtype)
        return grad, of_x, None, None, of_down, of_up, None, None, None


def _gated(node: Any) -> Tensor:
    """Multiply again what Liger's SwiGLU keeps, before it writes the gradients over it."""
    gate, up = node.saved_tensors
    return silu(gate).mul_(up)


# What multiplied a layer's input, by its node's name.
_PRODUCTS: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "LigerSiLUMulFunctionBackward": _gated,
}


def _is_kept_in_factors(x: Tensor) -> bool:
    """Return whether autograd keeps both factors whose product this is: it does where both have gradients.

    Hooks on what is saved, such as those of activation checkpointing, may let a tensor be read only once. The factors
    themselves are asked for them: the product may come out of a checkpoint that does not hold this layer.
    """
    node: Any = x.grad_fn
    if node is None or node.name() not in _PRODUCTS or any(to is None for to, _ in node.next_functions):
        return False
    of_python = getattr(node, "_raw_saved_tensors", None)
    factors = of_python or [getattr(node, f"_raw_saved_{name}", None) for name in ("self", "other")]
    # A private name, which another release may not have: then the product is kept.
    return all(getattr(factor, "unpack_hook", "unknown") is None for factor in factors)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:  # which autocast leaves alone
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _Cast:
    """Cast a tensor once for all layers that read it one after the other; forgotten with that tensor."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._cast: Tensor | None = None

    def of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.is_inference():  # which does not say when it is changed in place
            return x.detach().to(dtype)
        version, known = x._version, self._cast  # changed in place, it would be another
        if known is None or self._source is None or self._source() is not x:
            known = None
        if known is None or known.dtype != dtype or self._version != version:
            known = self._cast = x.detach().to(dtype)
            self._source, self._version = weakref.ref(x, self._forget), version
        return known

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self._source = self._cast = None
