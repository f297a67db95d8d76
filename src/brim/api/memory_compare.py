"""`brim memory --compare`: one model trained in several ways, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim.api.memory import predict_memory
from brim.api.memory_variants import Variant, variants
from brim.config import Config
from brim.memory.device import Device, devices
from brim.memory.prediction import MemoryPrediction
from brim.memory.sharding import Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One way to train, and what it takes."""

    variant: Variant
    prediction: MemoryPrediction
    fits_on: tuple[str, ...]  # devices of the catalogue, those of the least memory first

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.variant.name,
            "changes": dict(self.variant.changes),
            "fits_on": list(self.fits_on),
            **self.prediction.as_dict(),
        }


def compare_memory(
    config: Config,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    device: str | None = None,
    memory_bytes: int | None = None,
    world_size: int = 1,
    offload: Offload = "none",
) -> Iterator[Compared]:
    """A training step in each way, one after the other. Raises as `predict_memory` does."""
    for variant in variants(config):
        prediction = predict_memory(
            variant.config,
            batch_size=batch_size,
            sequence_length=sequence_length,
            phase="train",
            device=device,
            memory_bytes=memory_bytes,
            world_size=world_size,
            offload=offload,
        )
        yield Compared(variant=variant, prediction=prediction, fits_on=fitting(prediction.reserved_bytes))


def fitting(reserved_bytes: int) -> tuple[str, ...]:
    """The devices of the catalogue that have so much for PyTorch, the smallest first."""
    by_memory = sorted(devices(), key=_memory)
    return tuple(each.name for each in by_memory if reserved_bytes + each.outside_bytes <= each.memory_bytes)


def _memory(device: Device) -> int:
    return device.memory_bytes
