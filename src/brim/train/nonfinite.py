"""What is said of a step whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brim.errors import BrimError, Problem

# A bad row comes up once an epoch. Ten steps in a row mean that the weights themselves are no numbers any more, or that
# the learning rate throws them about: leaving steps out mends neither.
MOST_IN_A_ROW = 10
_MOST_ROWS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """One step that cannot be an update."""

    step: int
    loss: float
    norm: float  # of the gradient; NaN where the loss is not finite and the gradient was not looked at
    micro_batches: Sequence[int]  # those at fault, from 1
    num_micro_batches: int
    rows: Sequence[int]  # keys of their rows: 0-based row numbers of the source

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl of a step that was left out."""
        cause = "gradient" if math.isfinite(self.loss) else "loss"
        return {"step": self.step, "event": "skipped", "cause": cause, "rows": list(self.rows)}

    def stop(self) -> BrimError:
        """The error with `trainer.on_nonfinite: stop`."""
        return self._error(
            "look at these rows and at the base model; `trainer.on_nonfinite: skip` leaves such steps out, also with "
            "--resume; or train anew with a lower trainer.learning_rate"
        )

    def too_many(self) -> BrimError:
        """The error with `skip`, once so many steps in a row were left out."""
        return self._error(
            "that was the last of 10 such steps in a row, for which these rows cannot be the cause: train anew with a "
            "lower trainer.learning_rate, or with another base model or precision"
        )

    def _error(self, fix: str) -> BrimError:
        shown = ", ".join(map(str, self.rows[:_MOST_ROWS_SHOWN])) + (" …" if len(self.rows) > _MOST_ROWS_SHOWN else "")
        batches = ", ".join(map(str, self.micro_batches))
        return BrimError(
            Problem(
                what=f"step {self.step} is not finite (loss {self.loss:g}, gradient norm {self.norm:g}); nothing was "
                "updated",
                where=f"rows {shown} (numbered from 0; micro-batch {batches} of {self.num_micro_batches})",
                fix=fix,
            )
        )
