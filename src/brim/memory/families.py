"""How families of models differ from Llama in their weights; keys are named as transformers' configurations do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family differs from Llama."""

    norms: int = 2  # over D, in a layer
    rms: bool = True
    head_norms: Literal["none", "each head", "all heads"] = "none"  # on queries and keys
    qkv_bias: bool | str = "attention_bias"  # a key of config.json, which counts as false where it is missing
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    fused_qkv: str = ""  # the name of one matrix for queries, keys and values
    out: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: no gate; a gate and up in one: gate_up_proj
    tied: bool = False  # where config.json does not say
    head_bias: bool = False
    learned_positions: bool = False
    keeps_fp32_norms: bool = False  # a norm's product with its weight is fp32, whatever the model's data type
    fp32_softmax: bool = True  # of eager attention
    stem: str = "model.layers"
    attention_block: str = "self_attn"


_GPT = Family(
    rms=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    fused_qkv="c_attn",
    out="c_proj",
    mlp=("c_fc", "c_proj"),
    tied=True,
    learned_positions=True,
    fp32_softmax=False,
    stem="transformer.h",
    attention_block="attn",
)
LLAMA = Family()
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(qkv_bias=False, out_bias=False, mlp_bias=False),
    "ministral": Family(qkv_bias=False, out_bias=False, mlp_bias=False),
    "smollm3": Family(tied=True),
    "granite": LLAMA,
    "mixtral": Family(qkv_bias=False, out_bias=False, mlp_bias=False),
    "qwen2": Family(qkv_bias=True, out_bias=False, mlp_bias=False),
    "qwen3": Family(head_norms="each head", mlp_bias=False),
    "qwen3_moe": Family(head_norms="each head", mlp_bias=False),
    "gemma": Family(keeps_fp32_norms=True, mlp_bias=False, tied=True),
    "gemma2": Family(keeps_fp32_norms=True, norms=4, mlp_bias=False, tied=True),
    "gemma3_text": Family(keeps_fp32_norms=True, norms=4, mlp_bias=False, head_norms="each head", tied=True),
    "olmo2": Family(mlp_bias=False, head_norms="all heads"),
    "phi": Family(
        norms=1, rms=False, qkv_bias=True, out_bias=True, mlp_bias=True, out="dense", mlp=("fc1", "fc2"), head_bias=True
    ),
    "phi3": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, fused_qkv="qkv_proj", mlp=("gate_up_proj", "down_proj")
    ),
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": Family(
        rms=False,
        qkv_bias="attention_bias",
        mlp_bias=True,
        fused_qkv="query_key_value",
        out="dense",
        mlp=("dense_h_to_4h", "dense_4h_to_h"),
        stem="gpt_neox.layers",
        attention_block="attention",
    ),
    "starcoder2": Family(
        rms=False, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", mlp=("c_fc", "c_proj"), tied=True
    ),
}
DEFAULT_ACTIVATIONS = {"gpt2": "gelu_new", "phi": "gelu_new", "gpt_bigcode": "gelu_pytorch_tanh", "gpt_neox": "gelu"}
TRUE_WHERE_MISSING = {"use_bias", ("gpt_neox", "attention_bias")}
