"""What would help a training run for which the memory is too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Settings: TypeAlias = Mapping[str, Any]  # a resolved configuration, as JSON


def for_a_row(settings: Settings) -> str:
    """What makes the forward and backward pass of a row smaller, of what is not done already."""
    ways = ["train anew with shorter rows (preprocessing.global_max_sequence_length)"]
    if not settings.get("quantization"):
        ways.append("with a base in 4 bits and an adapter (quantization.bits: 4)")
    if not (settings.get("trainer") or {}).get("enable_gradient_checkpointing"):
        ways.insert(0, "set trainer.enable_gradient_checkpointing: true, also with --resume")
    return either(ways)


def for_an_update(settings: Settings) -> str:
    """What makes the optimizer's state and its step smaller, of what is not done already."""
    optimizer = str(((settings.get("trainer") or {}).get("optimizer") or {}).get("type", ""))
    ways = []
    if "8bit" not in optimizer:
        ways.append("states in 8 bits (trainer.optimizer.type: adamw_8bit)")
    if not optimizer.startswith("paged"):
        ways.append("states that move to the host when a GPU is full (paged_adamw_8bit)")
    if not settings.get("adapter"):
        ways.append("an adapter (adapter.type: lora)")
    return "train anew with " + either(ways or ["a smaller adapter (adapter.r)"])


def either(ways: Sequence[str]) -> str:
    """One of them, in a sentence."""
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
