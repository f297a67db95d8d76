"""The learning rate as a pure function of consumed samples and of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from brim.errors import ConfigError, Problem
from brim.train.batch_scaling import BatchScaling, batch_factor

Decay = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the peak, then a decay to the floor, on a clock of samples.

    During warm-up a step's rate is that of its last sample, so the first step learns something; afterwards it is that
    of its first sample. wsd (warm-up, stable, decay) stays at the peak until the last `decay_samples`, then falls
    linearly.

    With a scaling, all of it, the floor too, is multiplied by a factor of the batch. Nothing of that is stored, so it
    cannot be applied twice.
    """

    peak: float
    floor: float = 0.0
    decay: Decay = "constant"
    warmup_samples: int = 0
    decay_samples: int = 0  # wsd alone
    total_samples: int
    scaling: BatchScaling = "none"
    final_size: int | None = None  # rows of a step at which the factor is 1; needed with a scaling

    def __call__(self, *, consumed_samples: int, batch_samples: int, size: int | None = None) -> float:
        """The rate of the step that follows `consumed_samples` and takes `batch_samples` more.

        size: rows of the step as the schedule says, of which the end of an epoch may have cut some; needed with a
            scaling.
        """
        rate = self._unscaled(consumed_samples, batch_samples)
        if self.scaling == "none":
            return rate
        assert size is not None, "a scaling needs the size of the step"
        assert self.final_size is not None, "a scaling needs the final size"
        return rate * batch_factor(self.scaling, size=size, final_size=self.final_size)

    def _unscaled(self, consumed_samples: int, batch_samples: int) -> float:
        reached = consumed_samples + batch_samples
        if reached < self.warmup_samples:
            return self.peak * reached / self.warmup_samples
        share = self._share(consumed_samples)
        # The sum below may miss the peak by a rounding.
        return self.peak if share == 1 else self.floor + (self.peak - self.floor) * share

    def _share(self, consumed_samples: int) -> float:
        """What is left of the way from the floor to the peak, 1 to 0."""
        if self.decay == "constant":
            return 1.0
        length = self.decay_samples if self.decay == "wsd" else self.total_samples - self.warmup_samples
        progress = 1 - (self.total_samples - consumed_samples) / length if length > 0 else 0.0
        progress = min(max(progress, 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress


def require_room(*, warmup_samples: int, decay_samples: int, total_samples: int) -> None:
    """Raise ConfigError where a warm-up and a decay take more samples than the run has.

    decay_samples: those of wsd; 0 with another decay, which takes what the warm-up leaves.
    Both are rounded to whole samples, so that two halves of an odd number may come to one more: that passes.
    """
    if warmup_samples + decay_samples <= total_samples + 1 and max(warmup_samples, decay_samples) <= total_samples:
        return
    asked = [
        f"a {name} of {samples:,} samples"
        for name, samples in (("warm-up", warmup_samples), ("decay", decay_samples))
        if samples
    ]
    raise ConfigError(
        Problem(
            where="trainer.learning_rate_scheduler",
            what=f"{' and '.join(asked)} in a run of {total_samples:,}",
            expected="at most the run in all",
            fix="shorten warmup_length or decay_length, or train for longer",
        )
    )
