"""The weights of a causal language model, read from its config.json without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from brim.errors import ModelError, Problem
from brim.memory.families import DEFAULT_ACTIVATIONS, FAMILIES, LLAMA, TRUE_WHERE_MISSING, Family

Part: TypeAlias = Literal["embeddings", "attention", "mlp", "experts", "norms", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One weight matrix of a layer."""

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
        """Elements without the bias."""
        return self.copies * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """All elements."""
        return self.weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a closed form needs to know of a model. D: hidden size."""

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
        """The matrix's dotted path, by which adapters may name it."""
        return f"{self.stem}.{layer}.{linear.block}.{linear.name}"

    def parameters(self) -> dict[Part, int]:
        """Elements of the whole model by part; a tied head counts as embedding."""
        head = 0 if self.tied else self.vocabulary * self.hidden
        counts: dict[Part, int] = {"embeddings": self.embedding_parameters, "attention": 0, "mlp": 0, "experts": 0}
        for linear in self.linears:
            counts[linear.part] += self.layers * linear.parameters
        counts["norms"] = self.layers * self.norm_parameters + self.final_norm_parameters
        counts["head"] = head + (self.vocabulary if self.head_bias else 0)
        return counts


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes; that of the text where it also sees or hears.

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
    """Whole numbers of a config.json, under the first of their names that it has."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self._config, self._kind = config, kind

    def __call__(self, *names: str) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise ModelError(
            Problem(
                what=f"config.json does not say {names[0]}, a whole number above 0",
                where=f"model_type {self._kind}",
                expected=" or ".join(names),
                fix="copy config.json from the original model again",
            )
        )

    def optional(self, name: str, otherwise: int) -> int:
        """The number; another one where it is missing, null or 0."""
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

    def project(name: str, outputs: int) -> Linear:
        return Linear(
            name=name,
            part="attention",
            block=family.attention_block,
            inputs=hidden,
            outputs=outputs,
            bias=bias,
            reads="norm 1",
        )

    inner: tuple[Linear, ...]
    if family.fused_qkv:
        inner = (project(family.fused_qkv, queries + 2 * keys),)
    else:
        inner = (project("q_proj", queries), project("k_proj", keys), project("v_proj", keys))
    out_bias = _flag(family.out_bias, config, kind)
    out = Linear(
        name=family.out,
        part="attention",
        block=family.attention_block,
        inputs=queries,
        outputs=hidden,
        bias=out_bias,
        reads="attention's output",
    )
    return (*inner, out)


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
    return (
        Linear(name="gate", part="experts", block="mlp", inputs=hidden, outputs=copies, reads="norm 2"),
        Linear(
            name="gate_up_proj",
            part="experts",
            block="mlp",
            inputs=hidden,
            outputs=2 * wide,
            reads="norm 2",
            copies=copies,
        ),
        Linear(
            name="down_proj",
            part="experts",
            block="mlp",
            inputs=wide,
            outputs=hidden,
            reads="activation",
            copies=copies,
        ),
    )


def _flag(value: bool | str, config: Mapping[str, Any], kind: str) -> bool:
    if isinstance(value, bool):
        return value
    missing = value in TRUE_WHERE_MISSING or (kind, value) in TRUE_WHERE_MISSING
    return bool(config.get(value, missing))
