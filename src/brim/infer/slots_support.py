"""Which models and settings brim's own engine can generate with; transformers' `generate` does the others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NOT_OURS = {
    "guidance_scale": "classifier-free guidance runs the model twice",
    "prompt_lookup_num_tokens": "prompt lookup writes several tokens at once",
    "max_time": "a batch that ends by the clock is a batch that stays together",
}


def why_not_slots(architecture: type[PreTrainedModel], config: PretrainedConfig, settings: Mapping[str, Any]) -> str:
    """The reason against it, empty where there is none. settings: what `generation_settings` gives."""
    return _settings(settings) or _architecture(architecture, config)


def _settings(settings: Mapping[str, Any]) -> str:
    if settings.get("num_beams", 1) > 1:
        return "generation.num_beams: beams stay together"
    if settings.get("use_cache") is False:
        return "generation.use_cache is false"
    for name, reason in _NOT_OURS.items():
        if settings.get(name) is not None:
            return f"generation.{name}: {reason}"
    return ""


def _architecture(architecture: type[PreTrainedModel], config: PretrainedConfig) -> str:
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    name = architecture.__name__
    if config.is_encoder_decoder:
        return f"{name} reads the prompt with an encoder"
    if architecture._is_stateful or not architecture._supports_default_dynamic_cache():
        return f"{name} keeps a state that is not keys and values"
    if "past_key_values" not in inspect.signature(architecture.forward).parameters:
        return f"{name} keeps nothing of earlier tokens"
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    others = kinds - {DynamicLayer, DynamicSlidingWindowLayer}
    if others:
        return f"{name} keeps more than keys and values ({', '.join(sorted(kind.__name__ for kind in others))})"
    return ""


def model_class(architecture: PretrainedConfig) -> type[PreTrainedModel]:
    """What transformers would load; what a folder brings itself is taken for a plain decoder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(architecture), PreTrainedModel)
    return cast("type[PreTrainedModel]", found[0] if isinstance(found, tuple) else found)
