"""Which settings vLLM is asked to honour, and which it would not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from brim.infer.engine import Constraint
from brim.models.precision import Precision

_HONOURED = {
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}
_OFF: dict[str, Any] = {
    "num_beams": 1,
    "use_cache": True,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
}


def why_not_vllm(
    settings: Mapping[str, Any], *, precision: Precision, device: torch.device, constraint: Constraint | None = None
) -> str:
    """The reason against it, empty where there is none. settings: what `generation_settings` gives."""
    if device.type != "cuda":
        return f"it is for a CUDA GPU, and the device is {device.type}"
    if precision.autocast_dtype is not None:
        return f"precision is {precision.name}, and it knows no mixed one (bf16-true or fp32 would do)"
    if constraint is not None:
        return "responses are limited to labels, which brim does not hand on to it"
    for name, value in settings.items():
        if name not in _HONOURED and (name not in _OFF or value != _OFF[name]):
            return f"generation.{name} is not handed on to it"
    return ""
