"""How far a run has come: all that a resumed run must know beside tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Counted since the run's first step, over all its sessions. Saved as JSON in each checkpoint."""

    step: int = 0
    consumed_samples: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    evaluations_without_improvement: int = 0
    num_skipped: int = 0  # steps that were no update, since their loss or gradient was not finite
    num_skipped_in_a_row: int = 0  # the last ones
    loss_scaler: dict[str, Any] = field(default_factory=dict)  # fp16 alone
    batch_course: dict[str, Any] = field(default_factory=dict)  # of the effective batch
    rows_digest: str = ""  # of the training and validation rows, so that a run is not continued on other data

    def counts(self) -> dict[str, int]:
        """What a line of metrics.jsonl says of the run so far."""
        return {
            "num_samples": self.consumed_samples,
            "num_tokens": self.num_tokens,
            "num_supervised_tokens": self.num_supervised_tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def improve(self, metric: float, *, higher_is_better: bool) -> bool:
        """Take a validation metric in; whether it is the best so far. NaN and infinity never are."""
        better = math.isfinite(metric) and (
            self.best_metric is None or (metric > self.best_metric if higher_is_better else metric < self.best_metric)
        )
        if better:
            self.best_metric, self.best_step, self.evaluations_without_improvement = metric, self.step, 0
        else:
            self.evaluations_without_improvement += 1
        return better
