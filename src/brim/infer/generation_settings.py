"""From Ludwig's generation keys to transformers' settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brim.config import GenerationConfig

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_p")
_BEAM_KEYS = ("length_penalty", "early_stopping")


def generation_settings(generation: GenerationConfig, *, pad_id: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of transformers' GenerationConfig; keys that the chosen way of decoding ignores are left out.

    A temperature of 0 means greedy decoding. pad_id, end_ids: used where the configuration names no tokens itself;
    `eos_token_id` is a list in any case.
    """
    # In JSON's types: transformers wants lists where the configuration holds tuples, and refuses empty ones.
    given = generation.model_dump(mode="json", exclude={"engine"})
    settings = {key: value for key, value in given.items() if value is not None and value != []}
    if settings.get("temperature") == 0:
        settings["do_sample"] = False
    if settings.get("do_sample"):
        settings.setdefault("top_k", 0)  # null means all; transformers would take 50 for a key that is not there
    else:
        for key in _SAMPLING_KEYS:
            settings.pop(key, None)
    if settings.get("num_beams", 1) == 1:
        for key in _BEAM_KEYS:
            settings.pop(key, None)
    ends = settings.get("eos_token_id", list(end_ids))
    return {"pad_token_id": pad_id, **settings, "eos_token_id": ends if isinstance(ends, list) else [ends]}
