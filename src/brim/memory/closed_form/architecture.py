"""Read the weights of a causal language model from its config.json, without building it.

A table says how families of models differ from Llama in their weights; keys are named as transformers' configurations
name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from brim.errors import ModelError

Part: TypeAlias = Literal["embeddings", "attention", "mlp", "experts", "norms", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Describe one weight matrix of a layer."""

    name: str  # its last name, which adapters target
    part: Part
    block: str  # the module that it is in, such as self_attn
    inputs: int
    outputs: int
    bias: bool = False
    reads: str = ""  # matrices that read the same tensor say the same here
    copies: int = 1  # experts; their matrices are one parameter of three dimensions, in no linear layer

    @property
    def weights(self) -> int:
        """Return the elements without the bias."""
        return self.copies * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Return the elements with the bias."""
        return self.weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Hold what a closed form needs to know of a model. D: hidden size."""

    model_type: str
    is_known: bool  # False: none of the families below; taken for a Llama
    stem: str  # the path of the list of layers, such as model.layers
    layers: int
    hidden: int  # D
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the MLP, or of one expert
    activation: str  # of the MLP, by transformers' name
    experts_per_token: int  # 1 without experts
    vocabulary: int
    embedding_parameters: int  # tokens, and positions where they are learned
    linears: tuple[Linear, ...]  # of one layer
    gated: bool  # the MLP multiplies two projections
    rms_norms: bool  # else LayerNorm, which has a bias
    keeps_fp32_norms: bool
    fp32_softmax: bool  # of eager attention
    wide_norms: int  # norms over D in a layer
    head_norms: bool  # norms on queries and keys
    norm_parameters: int  # of one layer, all norms
    final_norm_parameters: int
    tied: bool  # the head is the embedding's matrix
    head_bias: bool

    def path(self, linear: Linear, layer: int) -> str:
        """Return the matrix's dotted path, by which adapters may name it."""
        return f"{self.stem}.{layer}.{linear.block}.{linear.name}"

    def parameters(self) -> dict[Part, int]:
        """Return the elements of the whole model by part; a tied head counts as embedding."""
        head = 0 if self.tied else self.vocabulary * self.hidden
        counts: dict[Part, int] = {"embeddings": self.embedding_parameters, "attention": 0, "mlp": 0, "experts": 0}
        for linear in self.linears:
            counts[linear.part] += self.layers * linear.parameters
        counts["norms"] = self.layers * self.norm_parameters + self.final_norm_parameters
        counts["head"] = head + (self.vocabulary if self.head_bias else 0)
        return counts


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture that a config.json describes; of a model that also sees or hears, that of the text.

    Raises ModelError when a size is missing.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "num_hidden_layers" in nested:
        config = {**nested, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind, LLAMA)
    sizes = _Sizes(config, kind)
    hidden, vocabulary = sizes("hidden_size", "n_embd", "d_model"), sizes("vocab_size")
    heads = sizes("num_attention_heads", "n_head")
    kv_heads = sizes.kv_heads(heads)
    head_dim = sizes.optional("head_dim", hidden // heads)
    experts = sizes.optional("num_local_experts", sizes.optional("num_experts", 0))
    wide = sizes.intermediate(hidden, is_expert=experts > 0)
    attention = _attention(family, config, kind, hidden, heads * head_dim, kv_heads * head_dim)
    mlp = _experts(hidden, wide, experts) if experts else _mlp(family, config, kind, hidden, wide)
    each_norm = hidden if family.rms else 2 * hidden
    on_heads = {"none": 0, "each head": 2 * head_dim, "all heads": (heads + kv_heads) * head_dim}[family.head_norms]
    positions = sizes("max_position_embeddings", "n_positions") if family.learned_positions else 0
    return Architecture(
        model_type=kind,
        is_known=kind in FAMILIES,
        stem=family.stem,
        layers=sizes("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=wide,
        activation=str(
            config.get("hidden_act") or config.get("activation_function") or DEFAULT_ACTIVATIONS.get(kind, "silu")
        ),
        experts_per_token=sizes.optional("num_experts_per_tok", 2) if experts else 1,
        vocabulary=vocabulary,
        embedding_parameters=(vocabulary + positions) * hidden,
        linears=(*attention, *mlp),
        gated=experts > 0 or len(family.mlp) == 3 or family.mlp[0] == "gate_up_proj",
        rms_norms=family.rms,
        keeps_fp32_norms=family.keeps_fp32_norms,
        fp32_softmax=family.fp32_softmax,
        wide_norms=family.norms,
        head_norms=family.head_norms != "none",
        norm_parameters=family.norms * each_norm + on_heads,
        final_norm_parameters=each_norm,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        head_bias=family.head_bias,
    )


class _Sizes:
    """Look up whole numbers of a config.json, under the first of their names that it has."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self._config, self._kind = config, kind

    def __call__(self, *names: str) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise ModelError(
            what=f"config.json does not say {names[0]}, a whole number above 0",
            where=f"model_type {self._kind}",
            expected=" or ".join(names),
            fix="copy config.json from the original model again",
        )

    def optional(self, name: str, otherwise: int) -> int:
        """Return the number; another one where it is missing, null or 0."""
        value = self._config.get(name)
        return value if isinstance(value, int) and value > 0 else otherwise

    def kv_heads(self, heads: int) -> int:
        if self._kind == "gpt_bigcode":
            return 1 if self._config.get("multi_query", True) else heads
        return heads if self._kind in ("gpt2", "gpt_neox") else self.optional("num_key_value_heads", heads)

    def intermediate(self, hidden: int, *, is_expert: bool) -> int:
        if is_expert and self._config.get("moe_intermediate_size"):
            return self("moe_intermediate_size")
        if self._kind in ("gpt2", "gpt_bigcode"):
            return self.optional("n_inner", 4 * hidden)
        return self("intermediate_size", "ffn_dim")


def _attention(
    family: Family, config: Mapping[str, Any], kind: str, hidden: int, queries: int, keys: int
) -> tuple[Linear, ...]:
    bias = _flag(family.qkv_bias, config, kind)

    out_bias, block = _flag(family.out_bias, config, kind), family.attention_block

    def linear(name: str, inputs: int, outputs: int, *, bias: bool, reads: str) -> Linear:
        return Linear(name=name, part="attention", block=block, inputs=inputs, outputs=outputs, bias=bias, reads=reads)

    separate = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    inner = {family.fused_qkv: queries + 2 * keys} if family.fused_qkv else separate
    return (
        *(linear(name, hidden, outputs, bias=bias, reads="norm 1") for name, outputs in inner.items()),
        linear(family.out, queries, hidden, bias=out_bias, reads="attention's output"),
    )


def _mlp(family: Family, config: Mapping[str, Any], kind: str, hidden: int, wide: int) -> tuple[Linear, ...]:
    bias = _flag(family.mlp_bias, config, kind)
    *into, out = family.mlp
    reads = "norm 1" if family.norms == 1 else "norm 2"
    outputs = 2 * wide if into == ["gate_up_proj"] else wide
    return (
        *(
            Linear(name=name, part="mlp", block="mlp", inputs=hidden, outputs=outputs, bias=bias, reads=reads)
            for name in into
        ),
        Linear(name=out, part="mlp", block="mlp", inputs=wide, outputs=hidden, bias=bias, reads="activation"),
    )


def _experts(hidden: int, wide: int, copies: int) -> tuple[Linear, ...]:
    def linear(name: str, inputs: int, outputs: int, *, reads: str, copies: int = copies) -> Linear:
        return Linear(
            name=name, part="experts", block="mlp", inputs=inputs, outputs=outputs, reads=reads, copies=copies
        )

    return (
        linear("gate", hidden, copies, reads="norm 2", copies=1),
        linear("gate_up_proj", hidden, 2 * wide, reads="norm 2"),
        linear("down_proj", wide, hidden, reads="activation"),
    )


def _flag(value: bool | str, config: Mapping[str, Any], kind: str) -> bool:
    if isinstance(value, bool):
        return value
    missing = value in TRUE_WHERE_MISSING or (kind, value) in TRUE_WHERE_MISSING
    return bool(config.get(value, missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Say how one family differs from Llama."""

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
