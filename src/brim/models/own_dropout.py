"""The dropout that a base model brings with it, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# As transformers' configurations name them: attention_dropout, resid_pdrop, hidden_dropout_prob, dropout_rate, …
_ENDINGS = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate")
# Of heads that a language model does not have.
_OF_OTHER_HEADS = {"classifier_dropout", "classifier_dropout_prob", "summary_first_dropout", "final_dropout"}


def own_dropout(settings: Mapping[str, Any]) -> dict[str, float]:
    """Name and rate of each dropout that is active in training.

    settings: config.json with the architecture's defaults (`PretrainedConfig.to_dict`).
    """
    text = settings.get("text_config")
    merged = {**settings, **(text if isinstance(text, Mapping) else {})}
    return {
        name: float(value)
        for name, value in merged.items()
        if name.endswith(_ENDINGS) and name not in _OF_OTHER_HEADS and isinstance(value, int | float) and value > 0
    }
