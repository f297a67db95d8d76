"""Put stand-ins for bitsandbytes' layers where transformers' quantizer would put those layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from brim.config.schema import QuantizationConfig
from brim.memory.trace import DYNAMIC_MAP_BYTES
from brim.models import require_bitsandbytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from brim.memory.bitsandbytes.linear import FourBits


def quantize_stand_in(
    model: PreTrainedModel,
    settings: QuantizationConfig,
    *,
    is_stored: bool = False,
    skip_modules: Sequence[str] | None = None,
    release: tuple[int, int] | None = None,
    quant_storage: torch.dtype = torch.uint8,
    scales_are_sharded: bool = True,
) -> None:
    """Replace the model's linear layers by stand-ins that allocate what bitsandbytes' layers do on CUDA.

    The output layer and what is tied to it stay, as in transformers (`replace_with_bnb_linear`,
    integrations/bitsandbytes.py), and so do experts, which no linear layer holds. What stays keeps its dtype. The model
    is on the meta device (then PEFT can adapt it, and its tensors may be replaced by fake ones afterwards) or fake.

    settings: resolved. is_stored: the folder's weights are quantised already. skip_modules: `llm_int8_skip_modules` of
    a stored model. release: of bitsandbytes; None takes the installed one. scales_are_sharded: where weights are, as
    brim does it. Raises ModelError where bitsandbytes cannot be imported.
    """
    require_bitsandbytes()
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    from brim.memory.bitsandbytes.linear import FourBits

    four_bits = None
    if settings.bits == 4:
        four_bits = FourBits(
            compute_dtype=getattr(torch, settings.bnb_4bit_compute_dtype),
            double_quant=settings.bnb_4bit_use_double_quant,
            quant_type=settings.bnb_4bit_quant_type,
            quant_storage=quant_storage,
            release=release or installed_release(),
            scales_are_sharded=scales_are_sharded,
        )
    kept = HfQuantizer.get_modules_to_not_convert(
        model, None if skip_modules is None else list(skip_modules), list(model._keep_in_fp32_modules or ())
    )
    for name, module in list(model.named_modules()):
        if should_convert_module(name, kept) and (isinstance(module, Conv1D) or type(module) is nn.Linear):
            with _where(cast(torch.Tensor, module.weight)):
                model.set_submodule(name, _stand_in(module, settings, four_bits))
    if four_bits is not None and four_bits.double_quant and not is_stored:
        with _where(next(model.parameters())):
            # Quantising makes one table for the process (name2qmap, functional.py). Older releases' layers point to it.
            table = torch.empty(DYNAMIC_MAP_BYTES // 4, dtype=torch.float32)
            model.register_buffer("bitsandbytes_dynamic_map", table, persistent=False)
    # PEFT chooses its layers by these; transformers' quantizer sets them after loading.
    setattr(model, f"is_loaded_in_{settings.bits}bit", True)


def installed_release() -> tuple[int, int]:
    """Return the first two numbers of the installed bitsandbytes' version."""
    from importlib.metadata import version

    major, minor = version("bitsandbytes").split(".")[:2]
    return int(major), int(minor)


def _stand_in(module: Any, settings: QuantizationConfig, four_bits: FourBits | None) -> nn.Module:
    """Make the layer that takes this one's place; its bias stays the same parameter, frozen."""
    from brim.memory.bitsandbytes.linear import StandInLinear4bit, StandInLinear8bit

    transposed = not isinstance(module, nn.Linear)  # GPT-2's Conv1D
    in_features, out_features = module.weight.shape if transposed else reversed(module.weight.shape)
    new: nn.Module
    if four_bits is not None:
        new = StandInLinear4bit(in_features, out_features, bias=module.bias, settings=four_bits)
    else:
        threshold = settings.llm_int8_threshold
        new = StandInLinear8bit(in_features, out_features, bias=module.bias, threshold=threshold)
    new.source_cls = type(module)  # type: ignore[assignment]  # as transformers does; loading.py reads it
    new.train(module.training)
    return new.requires_grad_(False)


def _where(weight: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the context in which new tensors are what this one is: fake, on meta, or real."""
    if isinstance(weight, FakeTensor):
        return weight.fake_mode
    return torch.device(weight.device)
