"""Compute in closed form what is trained, what the optimizer keeps of it, and what layers keep for backward passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from brim.config.schema import LoraConfig
from brim.memory.closed_form.architecture import Architecture, Linear

FP32_BYTES = 4


_BLOCK_8BIT = 256  # elements that share a scale in bitsandbytes' 8-bit states (bitsandbytes.optim.optimizer)


# PEFT's choice of target modules, where the user leaves it open (peft.utils.constants).
_QV = ("q_proj", "v_proj")


_PEFT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _QV),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neox": ("query_key_value",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Describe tensors of one shape that are trained."""

    rows: int
    columns: int  # 1: a vector
    count: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.count


def targets(architecture: Architecture, lora: LoraConfig) -> list[tuple[Linear, int]]:
    """Return each matrix of a layer that gets an adapter, with the number of layers; without experts' own weights."""
    found = []
    for linear in architecture.linears:
        if linear.part != "experts":
            paths = (architecture.path(linear, layer) for layer in range(architecture.layers))
            layers = sum(_is_target(path, lora, architecture.model_type) for path in paths)
            if layers:
                found.append((linear, layers))
    return found


def lora_tensors(architecture: Architecture, lora: LoraConfig) -> list[Trained]:
    """List A (r × inputs) and B (outputs × r) of each target; with DoRA a magnitude of each output."""
    tensors = []
    for linear, layers in targets(architecture, lora):
        tensors.append(Trained(rows=lora.r, columns=linear.inputs, count=layers))
        tensors.append(Trained(rows=linear.outputs, columns=lora.r, count=layers))
        if lora.use_dora:
            tensors.append(Trained(rows=linear.outputs, columns=1, count=layers))
    return tensors


def all_tensors(architecture: Architecture) -> list[Trained]:
    """List every weight of the model; norms of all layers are one entry."""
    wide, layers = architecture.hidden, architecture.layers
    tensors = [Trained(rows=architecture.embedding_parameters // wide, columns=wide, count=1)]
    for linear in architecture.linears:
        tensors.append(Trained(rows=linear.outputs, columns=linear.inputs, count=layers * linear.copies))
        if linear.bias:
            tensors.append(Trained(rows=linear.outputs, columns=1, count=layers))
    tensors.append(Trained(rows=architecture.norm_parameters, columns=1, count=layers))
    tensors.append(Trained(rows=architecture.final_norm_parameters, columns=1, count=1))
    if not architecture.tied:
        tensors.append(Trained(rows=architecture.vocabulary, columns=wide, count=1))
    if architecture.head_bias:
        tensors.append(Trained(rows=architecture.vocabulary, columns=1, count=1))
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Describe an update rule, as far as bytes depend on it."""

    type: str  # trainer.optimizer.type
    momentum: bool = False  # of sgd
    amsgrad: bool = False
    min_8bit_size: int = 4096  # smaller tensors keep 32-bit states


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Hold what an optimizer keeps from step to step."""

    num_bytes: int  # 0 where it is paged: that memory is not of PyTorch's allocator
    formula: str


def optimizer_state(optimizer: Optimizer, tensors: list[Trained], *, element_bytes: int) -> State:
    """Compute the state's bytes. element_bytes: of a trained weight, whose dtype torch's own optimizers take."""
    elements = sum(tensor.elements for tensor in tensors)
    kind = optimizer.type.removeprefix("paged_")
    if kind == "adafactor":
        kept = sum((t.rows + t.columns if t.columns > 1 else t.rows) * t.count for t in tensors)
        formula = f"{kept:,} row and column averages × {element_bytes} B"
        return State(num_bytes=kept * element_bytes, formula=formula)
    moments = _moments(kind, optimizer)
    if not moments:
        return State(num_bytes=0, formula="sgd without momentum keeps nothing")
    if kind.endswith("_8bit"):
        num_bytes, formula = _eight_bits(optimizer, tensors, moments)
    else:
        each = element_bytes if optimizer.type in ("adam", "adamw", "sgd") else FP32_BYTES
        num_bytes = elements * moments * each
        formula = f"{elements:,} trained × {moments} average{'s' if moments > 1 else ''} × {each} B"
    if optimizer.type.startswith("paged_"):
        return State(num_bytes=0, formula=f"{formula}, paged: outside PyTorch's allocator")
    return State(num_bytes=num_bytes, formula=formula)


def _moments(kind: str, optimizer: Optimizer) -> int:
    if kind.startswith("adam"):
        return 3 if optimizer.amsgrad else 2
    if kind == "sgd":
        return 1 if optimizer.momentum else 0
    return 1


def _eight_bits(optimizer: Optimizer, tensors: list[Trained], moments: int) -> tuple[int, str]:
    small = sum(t.elements for t in tensors if t.rows * t.columns < optimizer.min_8bit_size)
    large = [t for t in tensors if t.rows * t.columns >= optimizer.min_8bit_size]
    elements = sum(t.elements for t in large)
    scales = sum(-(-t.rows * t.columns // _BLOCK_8BIT) * t.count for t in large)
    formula = f"({elements:,} × 1 B + {scales:,} scales × 4 B) × {moments}"
    if small:
        formula += f" + {small:,} in small tensors × {moments} × 4 B"
    return moments * (elements + FP32_BYTES * scales + FP32_BYTES * small), formula


def _is_target(path: str, lora: LoraConfig, model_type: str) -> bool:
    names = lora.target_modules
    if names == "all-linear":
        return True
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    wanted = _PEFT_TARGETS.get(model_type, _QV) if names is None else names
    return path.endswith(tuple(f".{name}" for name in wanted))


_TENSORS_OF_GELU_NEW = 4  # x, x / 2, tanh and 1 + tanh: it is written in plain operators; others are one kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Hold the data types of a forward pass, as bytes of an element."""

    compute_bytes: int  # of what linear layers read and write
    residual_bytes: int  # of the stream between the layers
    autocast: bool  # linear layers read casts of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfLayer:
    """Hold what one part of a layer keeps."""

    name: str
    formula: str  # bytes a token, worked
    bytes_per_token: int


def kept_in_a_layer(
    architecture: Architecture,
    arithmetic: Arithmetic,
    *,
    lora: LoraConfig | None,
    attention: Literal["sdpa", "eager", "flash_attention_2"],
    sequence_length: int,
    recomputed: bool = False,
) -> list[PartOfLayer]:
    """Return each part's bytes a token. lora: None where all weights are trained. recomputed: by checkpointing.

    Follows what autograd saves: a product saves both factors, a linear layer its input where its weight is trained,
    fused attention its inputs, its output and a log-sum-exp a head, eager attention the probabilities of T × T.
    """
    parts = [
        _norms(architecture, arithmetic, trained=lora is None),
        _attention(architecture, arithmetic, attention, sequence_length),
        _mlp(architecture, arithmetic),
    ]
    if lora is None:
        parts.append(_inputs(architecture, arithmetic, attention))
    else:
        parts.append(_lora(architecture, arithmetic, lora, attention, recomputed=recomputed))
    return parts


def _norms(architecture: Architecture, arithmetic: Arithmetic, *, trained: bool) -> PartOfLayer:
    hidden, norms = architecture.hidden, architecture.wide_norms
    # RMSNorm computes in fp32 and keeps that copy; LayerNorm is one kernel, which keeps its input.
    each = FP32_BYTES if architecture.rms_norms or arithmetic.autocast else arithmetic.residual_bytes
    if trained and architecture.rms_norms:
        each += FP32_BYTES if architecture.keeps_fp32_norms else arithmetic.residual_bytes
    formula, total = f"{norms} × {hidden:,} × {each} B", norms * hidden * each
    if architecture.head_norms:
        on_heads = (architecture.heads + architecture.kv_heads) * architecture.head_dim
        each = FP32_BYTES + (arithmetic.compute_bytes if trained else 0)
        formula += f" + {on_heads:,} × {each} B"
        total += on_heads * each
    return PartOfLayer(name="norms", formula=formula, bytes_per_token=total)


def _attention(architecture: Architecture, arithmetic: Arithmetic, attention: str, sequence_length: int) -> PartOfLayer:
    queries = architecture.heads * architecture.head_dim
    keys = architecture.kv_heads * architecture.head_dim
    each = arithmetic.compute_bytes
    if attention == "eager":
        # Keys and values are repeated for all heads; the softmax keeps fp32, its product with the values a cast.
        of_one = FP32_BYTES + each if architecture.fp32_softmax and each != FP32_BYTES else each
        scores = architecture.heads * sequence_length
        return PartOfLayer(
            name="attention",
            formula=f"3 × {queries:,} × {each} B + {architecture.heads} heads × {sequence_length:,} × {of_one} B",
            bytes_per_token=3 * queries * each + scores * of_one,
        )
    return PartOfLayer(
        name="attention",
        formula=f"(2 × {queries:,} + 2 × {keys:,}) × {each} B + {architecture.heads} × 4 B",
        bytes_per_token=2 * (queries + keys) * each + architecture.heads * FP32_BYTES,
    )


def _mlp(architecture: Architecture, arithmetic: Arithmetic) -> PartOfLayer:
    wide, each, experts = architecture.intermediate, arithmetic.compute_bytes, architecture.experts_per_token
    # Gated: the gate, its activation and what it is multiplied by. Else the activation's input.
    tensors = 3 if architecture.gated else _TENSORS_OF_GELU_NEW if architecture.activation == "gelu_new" else 1
    formula, of_one = f"{tensors} × {wide:,}", tensors * wide
    if experts > 1:
        # What an expert writes is kept for its weight's gradient.
        formula = f"{experts} experts × ({formula} + {architecture.hidden:,})"
        of_one = experts * (of_one + architecture.hidden)
    name = "experts" if experts > 1 else "mlp"
    return PartOfLayer(name=name, formula=f"{formula} × {each} B", bytes_per_token=of_one * each)


def _inputs(architecture: Architecture, arithmetic: Arithmetic, attention: str) -> PartOfLayer:
    """Count what linear layers with trained weights read, where nothing else has kept it."""
    each = arithmetic.compute_bytes
    total, seen = 0, set()
    for linear in architecture.linears:
        is_kept = linear.reads == "attention's output" and attention != "eager"
        casts_anew = arithmetic.autocast and linear.reads.startswith("norm")
        if not is_kept and (casts_anew or linear.reads not in seen):
            total += linear.inputs * (architecture.experts_per_token if linear.copies > 1 else 1)
        seen.add(linear.reads)
    return PartOfLayer(name="inputs of linear layers", formula=f"{total:,} × {each} B", bytes_per_token=total * each)


def _lora(
    architecture: Architecture, arithmetic: Arithmetic, lora: LoraConfig, attention: str, *, recomputed: bool
) -> PartOfLayer:
    """Count for each target the inputs of A and B: brim's own function keeps what others have not kept, once.

    It keeps a gated MLP's product as its two factors, which are kept anyway, unless activations are recomputed, and
    dropout's mask in bits.
    """
    adapted = [linear for linear, _ in targets(architecture, lora)]
    if lora.use_dora or architecture.model_type == "gpt2":
        return _lora_of_peft(adapted, arithmetic, lora, attention)
    each, reading = arithmetic.compute_bytes, _once(adapted, attention)
    if architecture.gated and not recomputed:
        reading = [linear for linear in reading if linear.reads != "activation"]
    inputs = sum(linear.inputs for linear in reading)
    total = (inputs + lora.r * len(adapted)) * each
    formula = f"{inputs:,} × {each} B + {len(adapted)} × {lora.r} × {each} B"
    if lora.dropout:  # by row there is none
        masked = sum(linear.inputs for linear in adapted)
        total += masked // 8
        formula += f" + {masked:,} × 1 bit"
    return PartOfLayer(name="adapter", formula=formula, bytes_per_token=total)


def _lora_of_peft(adapted: list[Linear], arithmetic: Arithmetic, lora: LoraConfig, attention: str) -> PartOfLayer:
    """Count what PEFT keeps of DoRA and of transposed layers: in fp32 unless autocast is on, and dropout's mask."""
    each = arithmetic.compute_bytes if arithmetic.autocast else FP32_BYTES
    # Each target's A reads a tensor of its own where that is dropped out, or cast.
    is_own = lora.dropout > 0 or arithmetic.autocast or arithmetic.compute_bytes != FP32_BYTES
    reading = adapted if is_own else _once(adapted, attention)
    inputs = sum(linear.inputs for linear in reading)
    total = inputs * each + lora.r * len(adapted) * each
    formula = f"{inputs:,} × {each} B + {len(adapted)} × {lora.r} × {each} B"
    if lora.dropout:
        total += inputs
        formula += f" + {inputs:,} × 1 B"
    return PartOfLayer(name="adapter", formula=formula, bytes_per_token=total)


def _once(linears: list[Linear], attention: str) -> list[Linear]:
    """Keep one of those that read the same tensor, and none whose input fused attention keeps already."""
    kept = {linear.reads: linear for linear in linears}
    if attention != "eager":
        kept.pop("attention's output", None)
    return list(kept.values())
