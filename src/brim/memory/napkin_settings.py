"""What the napkin's rules depend on, from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from brim.config import Config, FinetuneTrainer, LoraConfig
from brim.config.batch import accumulates
from brim.memory.activation_rule import Arithmetic
from brim.memory.prediction import Phase
from brim.memory.trained import Lora, Optimizer

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How the base model's weights lie in memory."""

    element_bytes: int  # of weights that are not quantised
    linear_bytes: int  # of those of them that are frozen in linear layers: autocast's dtype, in which they are held
    bits: Literal[4, 8] | None = None  # of the layers' matrices
    double_quantization: bool = True  # of 4 bits: the scales, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the rules depend on, beside the architecture."""

    phase: Phase
    batch_size: int
    sequence_length: int
    weights: Weights
    arithmetic: Arithmetic
    new_tokens: int = 0  # of generate
    lora: Lora | None = None  # None: all weights are trained
    optimizer: Optimizer | None = None  # of train
    checkpointing: bool = False
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
    """The settings of a resolved configuration. base_config: the base model's config.json."""
    trainer = config.trainer if isinstance(config.trainer, FinetuneTrainer) and phase == "train" else None
    is_frozen = trainer is None or config.adapter is not None
    arithmetic, element_bytes = _data_types(config, base_config, is_frozen=is_frozen)
    attention = config.model_parameters.attn_implementation
    quantization = config.quantization
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
        lora=None if config.adapter is None else _lora(config.adapter),
        optimizer=None if trainer is None else optimizer_of(trainer),
        checkpointing=trainer is not None and trainer.enable_gradient_checkpointing is True,
        accumulates=trainer is not None and accumulates(trainer),
        attention="sdpa" if attention == "auto" else attention,  # which all but a few architectures have
        chunked_loss=chunked_loss,
        world_size=world_size,
    )


def stored_bytes(base_config: Mapping[str, Any]) -> int:
    """Bytes of a weight as it lies in the model's folder; 4 where config.json does not say."""
    return _BYTES.get(_stored(base_config), 4)


def _stored(base_config: Mapping[str, Any]) -> str:
    nested = base_config.get("text_config")
    for section in (base_config, nested if isinstance(nested, Mapping) else {}):
        name = section.get("dtype") or section.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return "float32"


def _data_types(config: Config, base_config: Mapping[str, Any], *, is_frozen: bool) -> tuple[Arithmetic, int]:
    """As in models/precision.py: mixed precision keeps trained weights in fp32, frozen ones as they are stored.

    What layers write in autocast's dtype is added to the embeddings' stored one: two dtypes of 16 bits make fp32.
    """
    if config.precision in ("fp32", "bf16-true"):
        each = 4 if config.precision == "fp32" else 2
        return Arithmetic(compute_bytes=each, residual_bytes=each, autocast=False), each
    element_bytes = stored_bytes(base_config) if is_frozen else 4
    is_one_dtype = is_frozen and _stored(base_config) == _AUTOCAST.get(config.precision)
    return Arithmetic(compute_bytes=2, residual_bytes=2 if is_one_dtype else 4, autocast=True), element_bytes


def _lora(adapter: LoraConfig) -> Lora:
    return Lora(
        r=adapter.r,
        target_modules=adapter.target_modules,
        dropout=adapter.dropout > 0,
        dora=adapter.use_dora,
    )


def optimizer_of(trainer: FinetuneTrainer) -> Optimizer:
    """The update rule that a configuration asks for."""
    keys = trainer.optimizer.model_dump()
    return Optimizer(
        type=keys["type"],
        momentum=bool(keys.get("momentum")),
        amsgrad=bool(keys.get("amsgrad")),
        min_8bit_size=keys.get("min_8bit_size", 0),
    )
