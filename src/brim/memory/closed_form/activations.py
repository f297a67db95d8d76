"""Compute the bytes per token that one decoder layer keeps for its backward pass: a closed form by parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brim.memory.closed_form.architecture import Architecture, Linear
from brim.memory.closed_form.trained import FP32_BYTES, Lora, targets

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
    lora: Lora | None,
    attention: Literal["sdpa", "eager", "flash_attention_2"],
    sequence_length: int,
) -> list[PartOfLayer]:
    """Return each part's bytes a token. lora: None where all weights are trained.

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
        parts.append(_lora(architecture, arithmetic, lora, attention))
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


def _lora(architecture: Architecture, arithmetic: Arithmetic, lora: Lora, attention: str) -> PartOfLayer:
    """Count for each target the inputs of A and B, in the adapter's fp32 unless autocast is on, and dropout's mask."""
    each = arithmetic.compute_bytes if arithmetic.autocast else FP32_BYTES
    adapted = [linear for linear, _ in targets(architecture, lora)]
    reading = adapted if _is_own(arithmetic, lora) else _once(adapted, attention)
    inputs = sum(linear.inputs for linear in reading)
    total = inputs * each + lora.r * len(adapted) * each
    formula = f"{inputs:,} × {each} B + {len(adapted)} × {lora.r} × {each} B"
    if lora.dropout:
        total += inputs
        formula += f" + {inputs:,} × 1 B"
    return PartOfLayer(name="adapter", formula=formula, bytes_per_token=total)


def _is_own(arithmetic: Arithmetic, lora: Lora) -> bool:
    """Return whether each target's A reads a tensor of its own: dropped out, or cast."""
    return lora.dropout or arithmetic.autocast or arithmetic.compute_bytes != FP32_BYTES


def _once(linears: list[Linear], attention: str) -> list[Linear]:
    """Keep one of those that read the same tensor, and none whose input fused attention keeps already."""
    kept = {linear.reads: linear for linear in linears}
    if attention != "eager":
        kept.pop("attention's output", None)
    return list(kept.values())
