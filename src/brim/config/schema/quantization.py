"""`quantization`: the base model's linear layers in 4 or 8 bits."""

from typing import Literal

from brim.config.schema.base import NonNegativeFloat, Section, key


class QuantizationConfig(Section):
    """The base model's linear layers in 4 or 8 bits, through bitsandbytes. They stay frozen: training needs an adapter.

    Embeddings, norms and the output layer are not quantised; `precision` says which data type they have.
    """

    backend: Literal["bitsandbytes"] = key(
        "bitsandbytes", "The library that quantises. `torchao` is not supported yet."
    )
    bits: Literal[4, 8] = key(
        4,
        "Of a weight. 4: NF4 or FP4 (QLoRA), dequantised where it is used. 8: LLM.int8, which on a GPU quantises the "
        "activations, too.",
    )
    llm_int8_threshold: NonNegativeFloat = key(
        6.0,
        "Columns of the activations with a value from here on are computed in 16 bits. 0: none. Of 8 bits, on a GPU.",
    )
    llm_int8_has_fp16_weight: Literal[False] = key(
        False, "`true` would keep 16-bit weights and quantise them at each use; not supported yet. Of 8 bits."
    )
    bnb_4bit_compute_dtype: Literal["auto", "float32", "float16", "bfloat16"] = key(
        "auto",
        "The data type in which dequantised weights are multiplied. `auto`: that of `precision`. Ludwig's default is "
        "`float16`. Of 4 bits.",
    )
    bnb_4bit_use_double_quant: bool = key(True, "Quantise the scales, too: 0.37 bits less for each weight. Of 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = key("nf4", "The 4-bit numbers: `nf4` or `fp4`. Of 4 bits.")


EIGHT_BIT_KEYS = ("llm_int8_threshold", "llm_int8_has_fp16_weight")
FOUR_BIT_KEYS = ("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type")
