"""Which attention kernel `model_parameters.attn_implementation: auto` has become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.config import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY = "model_parameters.attn_implementation"


def as_transformers_takes_it(setting: str) -> str | None:
    """What `from_pretrained` is given: with None it takes sdpa where the architecture has it, else eager."""
    return None if setting == "auto" else setting


def attention_choice(setting: str, model: PreTrainedModel) -> tuple[Choice, ...]:
    """What was chosen for a model that has been built; nothing where the user chose."""
    if setting != "auto":
        return ()
    chosen: str = model.config._attn_implementation
    architecture = type(model).__name__
    reason = f"{architecture} has it" if chosen == "sdpa" else f"{architecture} has no sdpa"
    return (Choice(key=_KEY, value=chosen, reason=reason),)
