"""The ways to train one model, from all weights in 32 bits to an adapter on 4: what each changes in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.config import AdamWConfig, Config, FinetuneTrainer, LoraConfig, QuantizationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way: the configuration with some keys changed."""

    name: str
    changes: Mapping[str, str]  # key -> value, as in YAML; only what differs from the user's
    config: Config


def variants(config: Config) -> tuple[Variant, ...]:
    """Full, 16-bit, LoRA, 8-bit and 4-bit (QLoRA), each with the user's other settings.

    An adapter and a quantization that the configuration has are kept where the way has one. A configuration that does
    not train is taken to train with AdamW. Biases do not train beside 16-bit or quantised weights. The precision is
    that of the device; `16-bit`, in which small updates are lost, is bfloat16 and for cards that have it.
    """
    adapter = config.adapter or LoraConfig(type="lora")
    if adapter.bias_type != "none":
        adapter = adapter.model_copy(update={"bias_type": "none"})
    given = config.quantization
    eight, four = (given if given and given.bits == bits else QuantizationConfig(bits=bits) for bits in (8, 4))
    return (
        _variant(config, "full", precision="auto", adapter=None, quantization=None),
        _variant(config, "16-bit", precision="bf16-true", adapter=None, quantization=None),
        _variant(config, "LoRA", precision="auto", adapter=adapter, quantization=None),
        _variant(config, "8-bit + LoRA", precision="auto", adapter=adapter, quantization=eight),
        _variant(config, "4-bit + LoRA", precision="auto", adapter=adapter, quantization=four),
    )


def _variant(config: Config, name: str, **keys: Any) -> Variant:
    if not isinstance(config.trainer, FinetuneTrainer):
        keys["trainer"] = FinetuneTrainer(optimizer=AdamWConfig(), batch_size=config.trainer.batch_size)
    if config.initialize == "random":
        keys["initialize"] = "pretrained"  # random weights have neither an adapter nor a quantization
    changes = {key: _said(key, value) for key, value in keys.items() if value != getattr(config, key)}
    return Variant(name=name, changes=changes, config=config.model_copy(update=keys))


def _said(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, QuantizationConfig):
        return f"{{bits: {value.bits}}}"
    if isinstance(value, LoraConfig):
        return f"{{type: lora, r: {value.r}}}"
    return "{type: finetune, optimizer: adamw}" if key == "trainer" else str(value)
