"""One update of the weights by a gradient that is ready; or none, where it is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from brim.batching.oom import is_out_of_memory
from brim.batching.second_try import second_try
from brim.batching.step import StepOutcome
from brim.train.clipping import clip, gradient_norm
from brim.train.gradient import Gradient, OnEvent
from brim.train.job import TrainJob
from brim.train.nonfinite import MOST_IN_A_ROW, NotFinite
from brim.train.out_of_memory import at_the_norm, failure_event, in_the_update
from brim.train.state import TrainState


class WeightUpdate:
    """Clips, steps the optimizer and drops the gradient; counts the steps that it leaves out.

    on_event: is told of each allocation that failed and was made up for.
    """

    def __init__(
        self, job: TrainJob, state: TrainState, gradient: Gradient, scaler: torch.amp.GradScaler, on_event: OnEvent
    ) -> None:
        self._job = job
        self._state = state
        self._gradient = gradient
        self._scaler = scaler
        self._on_event = on_event
        self._parameters = [p for p in job.model.parameters() if p.requires_grad]

    def norm(self, loss: float) -> float:
        """The gradient's norm; the gradient is unscaled and clipped. NaN, and nothing done, where nothing will be.

        Raises OutOfMemoryError. What is done in place is done once only: a second time would not be the same.
        """
        job = self._job
        if not math.isfinite(loss) and self._scaler.is_enabled():
            return math.nan  # once unscaled, the scaler wants its step
        try:
            self._scaler.unscale_(job.optimizer)
            norm = second_try(
                lambda: gradient_norm(self._parameters),
                on_failure=lambda message: self._on_event(failure_event("gradient norm", message)),
            )
            clip(self._parameters, norm, job.clipping)
            return float(norm)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = at_the_norm(error, step=self._state.step + 1, settings=job.settings)
        raise failure

    def __call__(
        self,
        outcome: StepOutcome,
        norm: float,
        *,
        size: int,
        learning_rate: float,
        random_before: Mapping[str, Tensor],
        saved_step: int | None,
    ) -> NotFinite | None:
        """Update the weights, or leave it out where loss or gradient are not finite. Raises BrimError to stop there.

        norm: what `norm` gave. size: rows of the step as the schedule says. saved_step: of the newest checkpoint.
        """
        job, scales = self._job, self._scaler.is_enabled()
        if not math.isfinite(outcome.loss) or (not math.isfinite(norm) and not scales):
            return self._leave_out(outcome, norm, random_before)
        self._state.num_skipped_in_a_row = 0
        job.rates.set(size=size, learning_rate=learning_rate)
        scale = self._scaler.get_scale()
        self._step_optimizer(saved_step)
        if self._scaler.get_scale() < scale:
            # fp16 gradients overflowed: the scaler left the update out and lowered its scale.
            job.observer.write({"step": self._state.step + 1, "event": "overflow", "loss_scale": scale})
        else:
            job.rates.stepped()
        job.optimizer.zero_grad(set_to_none=True)
        return None

    def _step_optimizer(self, saved_step: int | None) -> None:
        """Raises OutOfMemoryError where the weights may be half updated: nothing of them is saved from there on."""
        try:
            self._scaler.step(self._job.optimizer)
            self._scaler.update()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = in_the_update(
                error, step=self._state.step + 1, saved_step=saved_step, settings=self._job.settings
            )
        else:
            return
        raise failure

    def _leave_out(self, outcome: StepOutcome, norm: float, random_before: Mapping[str, Tensor]) -> NotFinite:
        """Neither weights nor optimizer hear of this step. Raises BrimError where the run is to stop."""
        job, state = self._job, self._state
        job.optimizer.zero_grad(set_to_none=True)
        at_fault = self._gradient.at_fault(outcome.parts, random_before)
        not_finite = NotFinite(
            step=state.step + 1,
            loss=outcome.loss,
            norm=norm,
            micro_batches=[number + 1 for number in at_fault],
            num_micro_batches=len(outcome.parts),
            rows=self._gradient.keys_of([outcome.parts[number] for number in at_fault]),
        )
        if job.on_nonfinite == "stop":
            raise not_finite.stop()
        state.num_skipped += 1
        state.num_skipped_in_a_row += 1
        if state.num_skipped_in_a_row == MOST_IN_A_ROW:
            raise not_finite.too_many()
        return not_finite
