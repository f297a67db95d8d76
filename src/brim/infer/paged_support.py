"""Which models and settings transformers' continuous batching gets right: texts as of a row alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brim.infer.engine import Constraint
from brim.infer.passes import base_model
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HONOURED = {"max_new_tokens", "do_sample", "num_beams", "use_cache", "renormalize_logits"}  # where it is greedy
_HONOURED |= {"pad_token_id", "bos_token_id", "eos_token_id"}
_OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
}
_LAYERS = {"full_attention", "sliding_attention"}


def why_not_paged(
    model: PreTrainedModel, settings: Mapping[str, Any], *, precision: Precision, constraint: Constraint | None = None
) -> str:
    """The reason against it, empty where there is none. settings: what `generation_settings` gives."""
    if constraint is not None:
        return "responses are limited to labels, and it has no place for that"
    return _version() or _settings(settings) or _precision(precision) or _architecture(model)


def _version() -> str:
    from transformers import __version__, generation

    config = getattr(generation, "ContinuousBatchingConfig", None)
    if config is None or page_field(config) is None:
        return f"transformers {__version__} has no ContinuousBatchingConfig that takes a page's tokens; 5.17 has one"
    return ""


def page_field(config: type[Any]) -> str | None:
    """Return what ContinuousBatchingConfig calls the tokens of a page; None where this version has no such field.

    transformers 5.17.0 calls it block_size, later versions page_size.
    """
    fields = getattr(config, "__dataclass_fields__", {})
    return next((name for name in ("page_size", "block_size") if name in fields), None)


def _settings(settings: Mapping[str, Any]) -> str:
    if settings.get("do_sample"):
        return "generation.do_sample: what is drawn would depend on the rows beside it"
    if settings.get("num_beams", 1) > 1:
        return "generation.num_beams: it has no beams"
    if settings.get("use_cache") is False:
        return "generation.use_cache is false"
    for name, value in settings.items():
        if name not in _HONOURED and (name not in _OFF or value != _OFF[name]):
            return f"generation.{name}: it does not honour it for each row by itself"
    return ""


def _precision(precision: Precision) -> str:
    # It runs in a thread of its own; autocast holds in the thread that entered it.
    return "" if precision.autocast_dtype is None else f"precision {precision.name}: it does not run under autocast"


def _architecture(model: PreTrainedModel) -> str:
    base = base_model(model)
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    # Those that compute attention by themselves generate without their cache, and say nothing.
    if not base._supports_attention_backend:
        return f"{name} computes attention in a way of its own"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if others:
        return f"{name} keeps more than keys and values ({', '.join(sorted(others))})"
    if getattr(config, "kv_lora_rank", None) is not None:
        return f"{name} has keys and values of different sizes"
    if base.config._attn_implementation not in ("sdpa", "eager") and "flash" not in base.config._attn_implementation:
        return f"it has no attention {base.config._attn_implementation}"
    return ""
