"""One colour, one name and one letter for each category of memory, the same in every table and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from brim.memory.events import CATEGORIES, Category
from brim.memory.prediction import MemoryPrediction

Part: TypeAlias = Category | Literal["unused", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a part of the memory is shown."""

    label: str
    colour: str
    letter: str  # where there are no colours
    meaning: str


# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart (jfly.uni-koeln.de/color).
LOOKS: Mapping[Part, Look] = {
    "weights": Look(label="weights", colour="#0072B2", letter="W", meaning="the model's and the adapter's parameters"),
    "gradients": Look(
        label="gradients", colour="#E69F00", letter="G", meaning="one for each parameter that is trained"
    ),
    "optimizer_state": Look(
        label="optimizer state", colour="#009E73", letter="O", meaning="running averages, kept from step to step"
    ),
    "activations": Look(
        label="activations", colour="#D55E00", letter="A", meaning="what the backward pass needs of the forward pass"
    ),
    "logits_and_loss": Look(
        label="logits and loss", colour="#CC79A7", letter="L", meaning="scores of every word of the vocabulary"
    ),
    "kv_cache": Look(label="KV cache", colour="#56B4E9", letter="K", meaning="keys and values of earlier tokens"),
    "workspace": Look(label="workspace", colour="#8C8C8C", letter="S", meaning="scratch memory of matrix libraries"),
    "temporary": Look(label="temporary", colour="#F0E442", letter="T", meaning="freed again within the same phase"),
    "unused": Look(
        label="held, not in use", colour="#D9D9D9", letter="h", meaning="reserved by PyTorch's allocator, in no tensor"
    ),
    "outside": Look(label="outside PyTorch", colour="#4D4D4D", letter="x", meaning="the CUDA context and libraries"),
}


def total_by_part(prediction: MemoryPrediction) -> dict[Part, int]:
    """The whole of what a device must have, by part: at the allocated peak, with the most that was reserved."""
    parts: dict[Part, int] = {category: prediction.by_category.get(category, 0) for category in CATEGORIES}
    parts["unused"] = prediction.reserved_bytes - sum(parts.values())
    parts["outside"] = prediction.outside_bytes
    return parts
