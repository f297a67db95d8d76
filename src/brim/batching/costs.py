"""What a micro-batch of a shape costs: its memory, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.surface import Surface


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The two models by which an effective batch is cut. Fixed when a run is launched; kept in its checkpoints.

    peak: bytes that PyTorch has allocated at the peak of a micro-batch's forward and backward pass, with weights,
    gradients and the optimizer's state at hand. static_bytes: what of it is there whatever the shape.
    scale: measured over predicted, of what the shape adds to static_bytes; 1.0 until something has been measured.
    time: seconds of a micro-batch's forward and backward pass.
    """

    peak: Surface
    static_bytes: int
    time: Surface
    scale: float = 1.0

    def peak_bytes(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Predicted for `rows` rows of `length` tokens, padding included; shapes broadcast."""
        return np.asarray(self.static_bytes + self.scale * (self.peak(rows, length) - self.static_bytes))

    def seconds(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Predicted for `rows` rows of `length` tokens, padding included; shapes broadcast."""
        return self.time(rows, length)

    def scale_to(self, peak_bytes: int, *, length: int) -> float:
        """The scale with which one row of this length, in tokens, peaks there."""
        added = float(self.peak(1, length)) - self.static_bytes
        return (peak_bytes - self.static_bytes) / added if added > 0 else self.scale

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "peak": self.peak.as_dict(),
            "static_bytes": self.static_bytes,
            "time": self.time.as_dict(),
            "scale": self.scale,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Costs:
        return cls(
            peak=Surface.from_dict(saved["peak"]),
            static_bytes=saved["static_bytes"],
            time=Surface.from_dict(saved["time"]),
            scale=saved["scale"],
        )
