"""The effective batch from step to step: how large it is, what is measured of it, and the points of its curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from brim.batching.adaptation import Adaptation
from brim.batching.noise_scale import NoiseMeasurement, NoiseScale
from brim.train.length import RunLength


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """What a step that updated the weights adds to the curve."""

    loss: float  # mean over its supervised tokens
    num_supervised_tokens: int
    consumed_samples: int  # with those of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """The steps since the last point."""

    since_sample: int = 0  # consumed at the last point
    loss_sum: float = 0.0  # over supervised tokens
    num_supervised_tokens: int = 0
    num_steps: int = 0

    def with_step(self, step: StepTaken) -> _Point:
        return replace(
            self,
            loss_sum=self.loss_sum + step.loss * step.num_supervised_tokens,
            num_supervised_tokens=self.num_supervised_tokens + step.num_supervised_tokens,
            num_steps=self.num_steps + 1,
        )


class BatchCourse:
    """Sizes are those of the schedule; where they follow the noise, those that it has led to so far.

    measure_every: steps between measurements of the gradient's noise; None: none.
    saved: what `state` gave at the checkpoint that a run goes on from; empty for a new run.
    """

    def __init__(self, length: RunLength, *, measure_every: int | None, saved: Mapping[str, Any]) -> None:
        self._length = length
        self._measure_every = measure_every
        self._last_size: int = saved.get("last_size", 0)  # of the step before; 0: there was none
        self._point = _Point(**saved.get("point", {}))
        self._noise = NoiseScale.from_dict(saved["noise"]) if "noise" in saved else NoiseScale()
        self._adaptation = length.adaptation
        if length.adaptation is not None and "adaptation" in saved:
            self._adaptation = Adaptation.from_dict(saved["adaptation"])

    def size(self, consumed_samples: int) -> int:
        """Rows of the step that begins there, as the schedule says: the end of an epoch or of the run may cut it."""
        return self._length.schedule.size_at(consumed_samples) if self._adaptation is None else self._adaptation.size

    @property
    def final_size(self) -> int:
        """That a point of the curve stands for, and that learning rates are relative to."""
        return self._length.schedule.final_size

    def switch(self, size: int) -> Mapping[str, Any] | None:
        """The event, without its step, where the next step has another size than the one before."""
        before = self._last_size
        if before in (0, size):
            return None
        return {"event": "schedule", "before": before, "effective_batch_size": size, "reason": self._reason()}

    def stepped(self, size: int) -> None:
        """A step of this size is over, whether or not it updated the weights."""
        self._last_size = size

    def measures(self, step: int) -> bool:
        """Whether the noise is measured in the step after so many."""
        return self._measure_every is not None and step % self._measure_every == 0

    def take_noise(self, measurement: NoiseMeasurement | None) -> Mapping[str, Any]:
        """What was measured in a step goes into the averages, and may move the batch; fields for the step's record."""
        if measurement is None:
            return {}
        self._noise = self._noise.after(measurement)
        if self._adaptation is not None:
            self._adaptation = self._adaptation.after(self._noise)
        return {
            "noise_scale": self._noise.rows,
            "gradient_variance": measurement.gradient_variance,
            "squared_gradient": measurement.squared_gradient,
        }

    def take_loss(self, step: StepTaken) -> Mapping[str, Any] | None:
        """A point of the curve, without its step, once the samples of a final batch are consumed.

        Only where the batch moves; else each step is a point. So curves compare with those of a run that does not ramp.
        """
        if not self._length.batch_moves:
            return None
        self._point = self._point.with_step(step)
        return self._point_at(step.consumed_samples)

    def left_out(self, consumed_samples: int) -> Mapping[str, Any] | None:
        """A step was no update: it adds nothing to the curve. Where it was the run's last one, the curve ends there."""
        is_over = consumed_samples >= self._length.total_samples
        return self._point_at(consumed_samples) if is_over and self._point.num_steps else None

    def _point_at(self, consumed: int) -> Mapping[str, Any] | None:
        is_over = consumed >= self._length.total_samples
        if consumed // self.final_size == self._point.since_sample // self.final_size and not is_over:
            return None
        point, self._point = self._point, _Point(since_sample=consumed)
        return {
            "event": "point",
            "loss": point.loss_sum / point.num_supervised_tokens,
            "num_steps": point.num_steps,
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on, as JSON."""
        state: dict[str, Any] = {"last_size": self._last_size, "point": asdict(self._point)}
        if self._measure_every is not None:
            state["noise"] = self._noise.as_dict()
        if self._adaptation is not None:
            state["adaptation"] = self._adaptation.as_dict()
        return state

    def _reason(self) -> str:
        if self._adaptation is None:
            return "schedule"
        return self._noise.in_words()
