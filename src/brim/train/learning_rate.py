"""The learning rate as a pure function of consumed samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then a decay to the floor, on a clock of samples.

    During warm-up a step's rate is that of its last sample, so the first step learns something; afterwards it is that
    of its first sample. wsd (warm-up, stable, decay) stays at the peak until the last `decay_samples`, then falls
    linearly.
    """

    peak: float
    floor: float = 0.0
    decay: Decay = "constant"
    warmup_samples: int = 0
    decay_samples: int = 0  # wsd alone
    total_samples: int

    def __call__(self, *, consumed_samples: int, batch_samples: int) -> float:
        """The rate of the step that follows `consumed_samples` and takes `batch_samples` more."""
        reached = consumed_samples + batch_samples
        if reached < self.warmup_samples:
            return self.peak * reached / self.warmup_samples
        return self.floor + (self.peak - self.floor) * self._share(consumed_samples)

    def _share(self, consumed_samples: int) -> float:
        """What is left of the way from the floor to the peak, 1 to 0."""
        if self.decay == "constant":
            return 1.0
        length = self.decay_samples if self.decay == "wsd" else self.total_samples - self.warmup_samples
        progress = 1 - (self.total_samples - consumed_samples) / length if length > 0 else 0.0
        progress = min(max(progress, 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
