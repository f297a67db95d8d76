"""What is said of a run's memory before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.memory.events import CATEGORIES, Category, Place
from brim.units import format_bytes

Phase: TypeAlias = Literal["load", "train", "evaluate", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over the predicted steps: E points, one after each allocation or release."""

    live_bytes: Mapping[Category, NDArray[np.int64]]  # each [E]
    reserved_bytes: NDArray[np.int64]  # [E]: what the caching allocator holds
    marks: tuple[tuple[int, str], ...]  # (point, what begins there), such as (0, "load"), (812, "step 1: forward")
    places: tuple[Place, ...]  # [E]

    def allocated_bytes(self) -> NDArray[np.int64]:
        """All categories together: [E]."""
        total: NDArray[np.int64] = np.sum([self.live_bytes[name] for name in CATEGORIES], axis=0, dtype=np.int64)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """The memory that one phase takes on one device; bytes as PyTorch's CUDA allocator counts them."""

    phase: Phase
    device: str  # as the catalogue or the user names it
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row; with `generate`, of each prompt
    world_size: int
    allocated_bytes: int  # peak
    reserved_bytes: int  # peak
    outside_bytes: int  # what lies outside PyTorch's allocator: context, libraries
    total_bytes: int  # reserved + outside: what the device must have
    end_allocated_bytes: int  # after the last step, gradients dropped
    by_category: Mapping[Category, int]  # at the peak; they sum to allocated_bytes
    peak: Place
    step_peaks_bytes: tuple[int, ...]  # allocated peak of each simulated step; the first bears the optimizer's state
    timeline: Timeline
    budget_bytes: int | None  # the device's memory; None: not known
    fits: bool | None
    reason: str  # one sentence with numbers
    choices: tuple[str, ...]  # each automatic choice: what, and why
    quantization_bits: int | None = None  # of the base model's weights; None: not quantised
    has_chunked_loss: bool = False  # logits and loss are computed for some positions at a time
    gradient_checkpointing: bool | None = None  # of `train`
    other: MemoryPrediction | None = None  # the same run with or without gradient checkpointing, where that is open

    def __repr__(self) -> str:
        fits = "" if self.fits is None else ", fits" if self.fits else ", does not fit"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in self.by_category.items() if size
        )
        return (
            f"MemoryPrediction: {self.shape_in_words()}: {format_bytes(self.total_bytes)}{fits}\n"
            f"  at the peak {parts}\n"
            f"  {self.reason}"
        )

    def shape_in_words(self) -> str:
        """Phase, rows and device: "train, 1 row × 2,048 tokens, on t4"."""
        rows = "row" if self.batch_size == 1 else "rows"
        shape = f"{self.batch_size:,} {rows} × {self.sequence_length:,} tokens"
        devices = f"{self.world_size} × {self.device}" if self.world_size > 1 else self.device
        return f"{self.phase}, {'no rows' if self.phase == 'load' else shape}, on {devices}"

    def as_dict(self) -> dict[str, Any]:
        """All but the timeline, for JSON; the names are those of the attributes."""
        brief = ("gradient_checkpointing", "allocated_bytes", "reserved_bytes", "total_bytes", "fits")
        return {
            "phase": self.phase,
            "device": self.device,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "world_size": self.world_size,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "outside_bytes": self.outside_bytes,
            "total_bytes": self.total_bytes,
            "end_allocated_bytes": self.end_allocated_bytes,
            "by_category": dict(self.by_category),
            "peak": {
                "phase": self.peak.phase,
                "layer": self.peak.layer,
                "module": self.peak.module,
                "operator": self.peak.operator,
            },
            "step_peaks_bytes": list(self.step_peaks_bytes),
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "reason": self.reason,
            "choices": list(self.choices),
            "quantization_bits": self.quantization_bits,
            "has_chunked_loss": self.has_chunked_loss,
            "gradient_checkpointing": self.gradient_checkpointing,
            "other": None if self.other is None else {name: getattr(self.other, name) for name in brief},
        }
