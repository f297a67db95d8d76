"""Compute in closed form which weights a configuration trains, and what the optimizer keeps of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
class Lora:
    """Hold an adapter's settings, as far as bytes depend on them."""

    r: int
    target_modules: tuple[str, ...] | str | None  # names, a regular expression or all-linear; None: PEFT's choice
    dropout: bool
    dora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Describe tensors of one shape that are trained."""

    rows: int
    columns: int  # 1: a vector
    count: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.count


def targets(architecture: Architecture, lora: Lora) -> list[tuple[Linear, int]]:
    """Return each matrix of a layer that gets an adapter, with the number of layers; without experts' own weights."""
    found = []
    for linear in architecture.linears:
        if linear.part != "experts":
            paths = (architecture.path(linear, layer) for layer in range(architecture.layers))
            layers = sum(_is_target(path, lora, architecture.model_type) for path in paths)
            if layers:
                found.append((linear, layers))
    return found


def lora_tensors(architecture: Architecture, lora: Lora) -> list[Trained]:
    """List A (r × inputs) and B (outputs × r) of each target; with DoRA a magnitude of each output."""
    tensors = []
    for linear, layers in targets(architecture, lora):
        tensors.append(Trained(rows=lora.r, columns=linear.inputs, count=layers))
        tensors.append(Trained(rows=linear.outputs, columns=lora.r, count=layers))
        if lora.dora:
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
    """Hold what an optimizer keeps from step to step, and what it needs for an update alone."""

    num_bytes: int  # 0 where it is paged: that memory is not of PyTorch's allocator
    formula: str
    temporary_bytes: int
    temporary_formula: str


def optimizer_state(optimizer: Optimizer, tensors: list[Trained], *, element_bytes: int) -> State:
    """Compute the state's bytes. element_bytes: of a trained weight, whose dtype torch's own optimizers take."""
    elements = sum(tensor.elements for tensor in tensors)
    kind = optimizer.type.removeprefix("paged_")
    if kind == "adafactor":
        kept = sum((t.rows + t.columns if t.columns > 1 else t.rows) * t.count for t in tensors)
        return _state(kept * element_bytes, f"{kept:,} row and column averages × {element_bytes} B")
    moments = _moments(kind, optimizer)
    if not moments:
        return _state(0, "sgd without momentum keeps nothing")
    if kind.endswith("_8bit"):
        return _paged(optimizer, _state(*_eight_bits(optimizer, tensors, moments)))
    if kind in ("adam", "adamw") and optimizer.type == kind:
        return State(
            num_bytes=elements * moments * element_bytes,
            formula=f"{elements:,} trained × {moments} averages × {element_bytes} B",
            # torch.optim's foreach form takes the root of all second averages at once.
            temporary_bytes=elements * element_bytes,
            temporary_formula=f"roots of {elements:,} second averages × {element_bytes} B",
        )
    each = element_bytes if kind == "sgd" else FP32_BYTES
    formula = f"{elements:,} trained × {moments} average{'s' if moments > 1 else ''} × {each} B"
    return _paged(optimizer, _state(elements * moments * each, formula))


def _state(num_bytes: int, formula: str) -> State:
    return State(num_bytes=num_bytes, formula=formula, temporary_bytes=0, temporary_formula="")


def _paged(optimizer: Optimizer, state: State) -> State:
    if not optimizer.type.startswith("paged_"):
        return state
    return _state(0, f"{state.formula}, paged: outside PyTorch's allocator")


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


def _is_target(path: str, lora: Lora, model_type: str) -> bool:
    names = lora.target_modules
    if names == "all-linear":
        return True
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    wanted = _PEFT_TARGETS.get(model_type, _QV) if names is None else names
    return path.endswith(tuple(f".{name}" for name in wanted))
