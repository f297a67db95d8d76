"""What the steps of a run took at their peaks, against what was predicted, for later plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from brim.batching.microbatch import MicroBatch
from brim.models.device import peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that steps took in which micro-batches of this shape were predicted to take the most."""

    rows: int
    padded_length: int  # tokens
    predicted_bytes: int
    measured_bytes: int | None  # allocated on a CUDA device, in the forward and backward passes; None elsewhere


class Peaks:
    """Reads a CUDA device's counters, which needs no waiting for the device. One peak a shape is kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = 0
        self._by_shape: dict[tuple[int, int], Peak] = {}

    def begin(self) -> None:
        """A step's passes begin."""
        if self._device.type == "cuda":
            self._most_bytes = self.most_bytes()
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, micro_batches: Iterable[MicroBatch]) -> None:
        """They ended well, at the first attempt, with these micro-batches."""
        predicted = [(batch.peak_bytes, batch) for batch in micro_batches if batch.peak_bytes is not None]
        if not predicted:
            return
        predicted_bytes, largest = max(predicted, key=lambda pair: pair[0])
        shape = (largest.num_rows, largest.padded_length)
        measured = int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else None
        before = self._by_shape.get(shape)
        if before is not None and before.measured_bytes is not None and measured is not None:
            measured = max(measured, before.measured_bytes)
        self._by_shape[shape] = Peak(
            rows=shape[0], padded_length=shape[1], predicted_bytes=predicted_bytes, measured_bytes=measured
        )

    def most_bytes(self) -> int:
        """The most memory used since this object was made, or since the process began: see `peak_bytes`."""
        return max(self._most_bytes, peak_bytes(self._device))

    def by_shape(self) -> tuple[Peak, ...]:
        """In the order in which the shapes first came."""
        return tuple(self._by_shape.values())
