"""Compute the memory of a step by rules that a person can follow: for explaining, never for deciding.

What the rules leave out, the trace has: temporary tensors of single operators, cuBLAS' workspaces, rounding to
blocks, rotary tables, trained biases of an adapter. How far the sum lies from the trace is printed beside it.

Legend: B rows, T tokens of a row, S = B × T, D hidden size, V vocabulary, r an adapter's rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from brim.config import accumulates
from brim.config.schema import Config, FinetuneTrainer, LoraConfig
from brim.memory.closed_form.architecture import Architecture, read_architecture
from brim.memory.closed_form.trained import (
    FP32_BYTES,
    Arithmetic,
    Optimizer,
    PartOfLayer,
    Trained,
    all_tensors,
    kept_in_a_layer,
    lora_tensors,
    optimizer_state,
)
from brim.memory.events import Category, Phase

if TYPE_CHECKING:
    from torch import nn

Moment: TypeAlias = Literal["load", "loss", "backward begins", "backward ends", "update", "prefill", "decode"]


MOMENTS: Mapping[Phase, tuple[Moment, ...]] = {
    "load": ("load",),
    "train": ("loss", "backward begins", "backward ends", "update"),
    "evaluate": ("loss",),
    "generate": ("prefill", "decode"),
}


# As in models/loss/chunked.py, which imports torch; a test compares them.
_CHUNK_BYTES, _FEWEST_ROWS, _TRAINED_HEAD_FACTOR = 128 << 20, 256, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Hold one line of the closed form: a name, the sum with its numbers, the bytes, and when they are there."""

    name: str
    category: Category
    formula: str
    num_bytes: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Napkin:
    """Hold the worked lines, and their total at each moment."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    moments: Mapping[Moment, int]  # bytes at each

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: self.moments[moment])

    @property
    def total_bytes(self) -> int:
        """Return the bytes at the largest moment."""
        return self.moments[self.peak]

    def as_dict(self) -> dict[str, Any]:
        """Return all for JSON; the names are those of the attributes."""
        lines = [{**asdict(line), "moments": list(line.moments)} for line in self.lines]
        totals = {"moments": dict(self.moments), "peak": self.peak, "total_bytes": self.total_bytes}
        return {"lines": lines, "notes": list(self.notes), **totals}


def napkin(config: Mapping[str, Any], settings: Settings) -> Napkin:
    """Work out a configuration's memory. config: the base model's config.json.

    Raises ModelError when config.json lacks a size.
    """
    architecture = read_architecture(config)
    lines = [*_weights(architecture, settings)]
    if settings.phase == "train":
        lines += _training(architecture, settings)
    if settings.phase == "evaluate":
        lines += [_one_layer(architecture, settings, ("loss",)), _logits(architecture, settings)]
    if settings.phase == "generate":
        lines += _generating(architecture, settings)
    note = f"{architecture.model_type or 'this architecture'} is not known to the napkin: taken for a Llama"
    moments = {
        moment: sum(line.num_bytes for line in lines if moment in line.moments) for moment in MOMENTS[settings.phase]
    }
    return Napkin(lines=tuple(lines), notes=() if architecture.is_known else (note,), moments=moments)


def _weights(architecture: Architecture, settings: Settings) -> list[Line]:
    always = MOMENTS[settings.phase]
    weights, parts = settings.weights, architecture.parameters()
    linear = sum(each.weights for each in architecture.linears if each.part != "experts") * architecture.layers
    lines = []
    plain = sum(parts.values())
    if weights.bits is not None:
        plain -= linear
        lines.append(_quantised(architecture, weights, linear, settings))
    counts = " + ".join(f"{name} {count:,}" for name, count in parts.items() if count)
    formula = f"{plain:,} parameters × {weights.element_bytes} B"
    if weights.bits is None:
        formula += f" ({counts}{'; the head is the embedding' if architecture.tied else ''})"
    num_bytes = plain * weights.element_bytes
    if weights.linear_bytes != weights.element_bytes:
        of_linear = 0 if architecture.tied else architecture.vocabulary * architecture.hidden
        of_linear += linear if weights.bits is None else 0
        num_bytes += of_linear * (weights.linear_bytes - weights.element_bytes)
        formula += f", of which {of_linear:,} frozen in linear layers × {weights.linear_bytes} B"
    lines.append(_shared("weights", "weights", formula, num_bytes, always, settings))
    if settings.lora is not None:
        added = sum(tensor.elements for tensor in lora_tensors(architecture, settings.lora))
        targets = settings.lora.target_modules
        named = ", ".join(targets) if isinstance(targets, tuple) else targets or "PEFT's target modules"
        formula = f"r {settings.lora.r} × (inputs + outputs) of {named} = {added:,} × 4 B"
        lines.append(_shared("adapter", "weights", formula, added * FP32_BYTES, always, settings))
    return lines


def _quantised(architecture: Architecture, weights: Weights, elements: int, settings: Settings) -> Line:
    """Count as bitsandbytes stores: in 4 bits a scale for 64 values, itself quantised or not; in 8 bits one a row."""
    if weights.bits == 8:
        rows = sum(each.outputs for each in architecture.linears if each.part != "experts") * architecture.layers
        num_bytes, formula = elements + FP32_BYTES * rows, f"{elements:,} × 1 B + {rows:,} scales × 4 B"
    else:
        blocks = elements // 64
        if weights.double_quantization:
            num_bytes = elements // 2 + blocks + blocks // 256 * FP32_BYTES
            formula = f"{elements:,} × 4.127 bits"
        else:
            num_bytes, formula = elements // 2 + FP32_BYTES * blocks, f"{elements:,} × 4.5 bits"
    name = f"weights in {weights.bits} bits"
    return _shared(name, "weights", formula, num_bytes, MOMENTS[settings.phase], settings)


def _training(architecture: Architecture, settings: Settings) -> list[Line]:
    assert settings.optimizer is not None, "training has an optimizer"
    tensors = all_tensors(architecture) if settings.lora is None else lora_tensors(architecture, settings.lora)
    element_bytes = settings.weights.element_bytes if settings.lora is None else FP32_BYTES
    state = optimizer_state(settings.optimizer, tensors, element_bytes=element_bytes)
    everywhere = MOMENTS["train"]
    lines = [
        _gradients(tensors, element_bytes, settings),
        _shared(settings.optimizer.type, "optimizer_state", state.formula, state.num_bytes, everywhere, settings),
    ]
    lines += _casts(architecture, settings)
    lines += _activations(architecture, settings)
    lines.append(_logits(architecture, settings))
    return lines


def _gradients(tensors: list[Trained], element_bytes: int, settings: Settings) -> Line:
    elements = sum(tensor.elements for tensor in tensors)
    at: tuple[Moment, ...] = MOMENTS["train"] if settings.accumulates else ("backward ends", "update")
    formula = f"{elements:,} trained × {element_bytes} B"
    return _shared("gradients", "gradients", formula, elements * element_bytes, at, settings)


def _casts(architecture: Architecture, settings: Settings) -> list[Line]:
    """Count autocast's 16-bit copies of fp32 weights that train, which the backward pass needs again."""
    arithmetic = settings.arithmetic
    if not arithmetic.autocast or settings.lora is not None:
        return []
    elements = sum(each.weights for each in architecture.linears) * architecture.layers
    elements += architecture.vocabulary * architecture.hidden
    formula = f"{elements:,} weights of linear layers × {arithmetic.compute_bytes} B"
    num_bytes = elements * arithmetic.compute_bytes
    at: tuple[Moment, ...] = ("loss", "backward begins")
    return [Line(name="casts", category="weights", formula=formula, num_bytes=num_bytes, moments=at)]


def _activations(architecture: Architecture, settings: Settings) -> list[Line]:
    tokens, layers = settings.batch_size * settings.sequence_length, architecture.layers
    at: tuple[Moment, ...] = ("loss", "backward begins")
    recomputed = layers if settings.checkpointing is True else int(settings.checkpointing)
    kept, lines = layers - recomputed, []
    if kept:
        each, formula = _layer(architecture, replace(settings, checkpointing=False))
        formula = f"{tokens:,} tokens × {kept} layers × {each:,} B ({formula})"
        num_bytes = tokens * kept * each
        lines.append(Line(name="activations", category="activations", formula=formula, num_bytes=num_bytes, moments=at))
    if recomputed:
        width, each = architecture.hidden, settings.arithmetic.residual_bytes
        formula = f"{tokens:,} tokens × {recomputed} layers × {width:,} × {each} B"
        num_bytes = tokens * recomputed * width * each
        lines.append(
            Line(name="between the layers", category="activations", formula=formula, num_bytes=num_bytes, moments=at)
        )
        # The first layers, which are recomputed last, find what the others kept gone.
        moments: tuple[Moment, ...] = ("backward begins", "backward ends")
        lines.append(_one_layer(architecture, settings, moments[1:] if kept else moments))
    return lines


def _one_layer(architecture: Architecture, settings: Settings, at: tuple[Moment, ...]) -> Line:
    tokens = settings.batch_size * settings.sequence_length
    each, formula = _layer(architecture, settings)
    return Line(
        name="inside one layer",
        category="activations",
        formula=f"{tokens:,} tokens × {each:,} B ({formula})",
        num_bytes=tokens * each,
        moments=at,
    )


def _layer(architecture: Architecture, settings: Settings) -> tuple[int, str]:
    """Return the bytes a token that one layer keeps, and the formula."""
    parts: list[PartOfLayer] = kept_in_a_layer(
        architecture,
        settings.arithmetic,
        lora=settings.lora,
        attention=settings.attention,
        sequence_length=settings.sequence_length,
        recomputed=settings.checkpointing is not False,
    )
    formula = "; ".join(f"{part.name} {part.formula}" for part in parts if part.bytes_per_token)
    return sum(part.bytes_per_token for part in parts), formula


def _logits(architecture: Architecture, settings: Settings) -> Line:
    tokens, words = settings.batch_size * settings.sequence_length, architecture.vocabulary
    if settings.phase == "evaluate":
        each = settings.arithmetic.compute_bytes
        formula = f"{tokens:,} positions × {words:,} words × ({each} + 4 + 4) B"
        num_bytes = tokens * words * (each + 2 * FP32_BYTES)
    elif settings.chunked_loss:
        formula, num_bytes = _chunk_of_logits(architecture, settings, tokens)
    else:  # log-probabilities, their gradient and the logits' gradient, all fp32, when the backward pass begins
        formula = f"{tokens:,} positions × {words:,} words × 3 × 4 B"
        num_bytes = tokens * words * 3 * FP32_BYTES
    return Line(
        name="logits and loss", category="logits_and_loss", formula=formula, num_bytes=num_bytes, moments=("loss",)
    )


def _chunk_of_logits(architecture: Architecture, settings: Settings, tokens: int) -> tuple[str, int]:
    """Count a chunk in fp32 and the head's dtype, hidden states and gradients, and a trained head's gradient."""
    words, width, each = architecture.vocabulary, architecture.hidden, settings.arithmetic.compute_bytes
    head_trains = settings.lora is None
    factor = _TRAINED_HEAD_FACTOR if head_trains else 1
    rows = min(tokens, factor * max(_FEWEST_ROWS, _CHUNK_BYTES // (FP32_BYTES * words)))
    formula = f"{rows:,} positions × {words:,} words × (4 + {each}) B + 2 × {tokens:,} tokens × {width:,} × {each} B"
    num_bytes = rows * words * (FP32_BYTES + each) + 2 * tokens * width * each
    if head_trains:
        formula += f" + {words:,} × {width:,} × 4 B"
        num_bytes += words * width * FP32_BYTES
    return formula, num_bytes


def _generating(architecture: Architecture, settings: Settings) -> list[Line]:
    rows, each = settings.batch_size, settings.arithmetic.compute_bytes
    width = architecture.kv_heads * architecture.head_dim
    token_bytes = 2 * architecture.layers * width * each

    def cache(tokens: int, at: Moment) -> Line:
        formula = f"{rows} rows × {tokens:,} tokens × 2 × {architecture.layers} layers × {width:,} × {each} B"
        total = rows * tokens * token_bytes
        return Line(name=f"KV cache, {at}", category="kv_cache", formula=formula, num_bytes=total, moments=(at,))

    words = architecture.vocabulary
    return [
        cache(settings.sequence_length, "prefill"),
        cache(settings.sequence_length + settings.new_tokens, "decode"),
        _one_layer(architecture, settings, ("prefill",)),
        Line(
            name="logits",
            category="logits_and_loss",
            formula=f"{rows} rows × {words:,} words × ({each} + 4) B",
            num_bytes=rows * words * (each + FP32_BYTES),
            moments=MOMENTS["generate"],
        ),
    ]


def _shared(
    name: str, category: Category, formula: str, num_bytes: int, at: tuple[Moment, ...], settings: Settings
) -> Line:
    """Make a line of what is sharded over all processes."""
    if settings.world_size > 1:
        formula += f" / {settings.world_size} processes"
        num_bytes = -(-num_bytes // settings.world_size)
    return Line(name=name, category=category, formula=formula, num_bytes=num_bytes, moments=at)


_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Say how the base model's weights lie in memory."""

    element_bytes: int  # of weights that are not quantised
    linear_bytes: int  # of those of them that are frozen in linear layers: autocast's dtype, in which they are held
    bits: Literal[4, 8] | None = None  # of the layers' matrices
    double_quantization: bool = True  # of 4 bits: the scales, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold all that the rules depend on, beside the architecture."""

    phase: Phase
    batch_size: int
    sequence_length: int
    weights: Weights
    arithmetic: Arithmetic
    new_tokens: int = 0  # of generate
    lora: LoraConfig | None = None  # None: all weights are trained
    optimizer: Optimizer | None = None  # of train
    checkpointing: bool | int = False  # a number: of so many layers
    accumulates: bool = False  # gradients are there when the next micro-batch begins
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    chunked_loss: bool = False
    world_size: int = 1  # processes over which weights, gradients and states are sharded


def settings_of(
    config: Config,
    base_config: Mapping[str, Any],
    *,
    phase: Phase,
    batch_size: int,
    sequence_length: int,
    world_size: int = 1,
    chunked_loss: bool = False,
) -> Settings:
    """Read the settings of a resolved configuration. base_config: the base model's config.json."""
    trainer = config.trainer if isinstance(config.trainer, FinetuneTrainer) and phase == "train" else None
    is_frozen = trainer is None or config.adapter is not None
    arithmetic, element_bytes = _data_types(config, base_config, is_frozen=is_frozen)
    attention = config.model_parameters.attn_implementation
    quantization = config.quantization
    checkpointing = trainer is not None and trainer.enable_gradient_checkpointing
    checkpointing = checkpointing != "auto" and checkpointing
    weights = Weights(
        element_bytes=element_bytes, linear_bytes=arithmetic.compute_bytes if is_frozen else element_bytes
    )
    if quantization is not None:
        double = quantization.bnb_4bit_use_double_quant
        weights = replace(weights, bits=quantization.bits, double_quantization=double)
    return Settings(
        phase=phase,
        batch_size=batch_size * (config.generation.num_beams if phase == "generate" else 1),
        sequence_length=sequence_length,
        weights=weights,
        arithmetic=arithmetic,
        new_tokens=config.generation.max_new_tokens or 0,
        lora=config.adapter,
        optimizer=None if trainer is None else _optimizer_of(trainer),
        checkpointing=checkpointing,
        accumulates=trainer is not None and accumulates(trainer),
        attention="sdpa" if attention == "auto" else attention,  # which all but a few architectures have
        chunked_loss=chunked_loss,
        world_size=world_size,
    )


def stored_bytes(base_config: Mapping[str, Any]) -> int:
    """Return the bytes of a weight as it lies in the model's folder; 4 where config.json does not say."""
    return _BYTES.get(_stored(base_config), 4)


def _stored(base_config: Mapping[str, Any]) -> str:
    nested = base_config.get("text_config")
    for section in (base_config, nested if isinstance(nested, Mapping) else {}):
        name = section.get("dtype") or section.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return "float32"


def _data_types(config: Config, base_config: Mapping[str, Any], *, is_frozen: bool) -> tuple[Arithmetic, int]:
    """Decide as models/device.py does: mixed precision keeps trained weights in fp32, frozen ones as they are stored.

    What layers write in autocast's dtype is added to the embeddings' stored one: two dtypes of 16 bits make fp32.
    """
    if config.precision in ("fp32", "bf16-true"):
        each = 4 if config.precision == "fp32" else 2
        return Arithmetic(compute_bytes=each, residual_bytes=each, autocast=False), each
    element_bytes = stored_bytes(base_config) if is_frozen else 4
    is_one_dtype = is_frozen and _stored(base_config) == _AUTOCAST.get(config.precision)
    return Arithmetic(compute_bytes=2, residual_bytes=2 if is_one_dtype else 4, autocast=True), element_bytes


def counted_state_bytes(trainer: FinetuneTrainer, model: nn.Module) -> int:
    """Return the bytes of the optimizer's state in closed form, for a model that cannot be traced."""
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.numel()]
    tensors = [
        Trained(rows=weight.shape[0] if weight.ndim else 1, columns=weight[:1].numel() if weight.ndim else 1, count=1)
        for weight in trained
    ]
    element_bytes = max((weight.element_size() for weight in trained), default=0)
    return optimizer_state(_optimizer_of(trainer), tensors, element_bytes=element_bytes).num_bytes


def _optimizer_of(trainer: FinetuneTrainer) -> Optimizer:
    """Return the update rule that a configuration asks for."""
    keys = trainer.optimizer.model_dump()
    return Optimizer(
        type=keys["type"],
        momentum=bool(keys.get("momentum")),
        amsgrad=bool(keys.get("amsgrad")),
        min_8bit_size=keys.get("min_8bit_size", 0),
    )
