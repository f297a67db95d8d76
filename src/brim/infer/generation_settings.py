"""From Ludwig's generation keys to transformers' settings."""

from __future__ import annotations

from typing import Any

from brim.config import GenerationConfig

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_p")
_BEAM_KEYS = ("length_penalty", "early_stopping")


def generation_settings(generation: GenerationConfig) -> dict[str, Any]:
    """Keyword arguments of transformers' GenerationConfig; keys that the chosen way of decoding ignores are left out.

    A temperature of 0 means greedy decoding.
    """
    settings = {key: value for key, value in generation.model_dump().items() if value is not None}
    if settings.get("temperature") == 0:
        settings["do_sample"] = False
    if not settings.get("do_sample"):
        for key in _SAMPLING_KEYS:
            settings.pop(key, None)
    if settings.get("num_beams", 1) == 1:
        for key in _BEAM_KEYS:
            settings.pop(key, None)
    return settings
