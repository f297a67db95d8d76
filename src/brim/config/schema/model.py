"""`model_parameters`: how the base model is set up."""

from typing import Literal

from brim.config.schema.base import Section, key


class ModelParameters(Section):
    """How the base model is set up."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto",
        "The attention kernel, by transformers' name. `auto`: `sdpa` where the architecture has it, else `eager`. "
        "`flash_attention_2` needs its package.",
        brim=True,
    )
