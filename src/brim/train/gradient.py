"""The gradient of a job's effective batch: its rows through the model, in micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.batching.noise_scale import NUM_GROUPS, NoiseMeasurement, measure
from brim.batching.oom import is_out_of_memory
from brim.batching.random_states import random_states, restore_random_states
from brim.batching.step import GradientStep, Part, StepOutcome
from brim.train.gradient_norms import GradientNorms
from brim.train.job import TrainJob
from brim.train.micro_batch_pass import MicroBatchPass

OnEvent = Callable[[Mapping[str, Any]], None]


class Gradient:
    """Sums gradients into the model's parameters; the optimizer is the loop's.

    on_event: is told of each allocation that failed, with the keys of the rows, and of what followed.
    """

    def __init__(self, job: TrainJob, scaler: torch.amp.GradScaler, on_event: OnEvent) -> None:
        self.noise: NoiseMeasurement | None = None  # of the last sum; None: not measured, or there was nothing to say
        self._job = job
        self._scaler = scaler
        self._pass = MicroBatchPass(
            model=job.model,
            head=job.head,
            rows=job.rows,
            pad_id=job.pad_id,
            device=job.device,
            precision=job.precision,
            scaler=scaler,
            row_dropout=job.row_dropout,
        )
        self._on_event = on_event
        self._parameters = [p for p in job.model.parameters() if p.requires_grad]
        self._indices: NDArray[np.intp] = np.zeros(0, dtype=np.intp)  # of the effective batch among the job's rows
        self._num_supervised = 0  # tokens of it
        self._number = 0  # of the step
        self._last = self._indices  # rows that went into the model last
        # No module: language models keep no running averages, and a rotary embedding that grows with the longest row
        # seen keeps that length beside its buffer, which would be put back alone.
        self._step = GradientStep(
            cutter=job.cutter,
            parameters=self._parameters,
            backward=lambda positions: self._backward(self._indices[positions]),
            on_event=self._hear,
            name_row=lambda position: f"row {int(job.rows.keys[self._indices[position]])} (numbered from 0)",
        )

    def sum(
        self, indices: NDArray[np.intp], num_supervised: int, *, step: int, measures_noise: bool = False
    ) -> StepOutcome:
        """The gradient of the mean loss over the supervised tokens of these rows, positions among the job's.

        step: its number, which decides with a row's key what is dropped, where that is drawn by row. measures_noise:
        cut the batch into random groups of rows, and set `noise`.
        Raises OutOfMemoryError when a row alone runs out of memory; no gradient is left then.
        """
        self._indices, self._num_supervised, self._number = indices, num_supervised, step
        self.noise = None
        self._job.model.train()
        lengths = self._job.rows.lengths[indices]
        if not measures_noise or len(indices) == 1:
            return self._step.run(lengths)
        with GradientNorms(self._parameters) as norms:
            outcome = self._step.run(lengths, num_groups=NUM_GROUPS, meter=norms)
        self.noise = self._noise_of(outcome.parts, norms)
        return outcome

    def keys_of(self, parts: Sequence[Part]) -> list[int]:
        """The keys of the rows of one or more parts, in order."""
        rows = np.concatenate([self._rows_of(part) for part in parts])
        return sorted(int(key) for key in self._job.rows.keys[rows])

    def at_fault(self, parts: Sequence[Part], random_before: Mapping[str, Tensor]) -> list[int]:
        """The micro-batches whose loss is not finite; else those whose gradient is not, each replayed by itself.

        random_before: the random states in which the step began. All parts, where the replay runs out of memory.
        The losses were kept on the device, so that a step that is well is not held up by looking at each.
        """
        by_loss = [number for number, part in enumerate(parts) if not math.isfinite(part.loss.item())]
        if by_loss:
            return by_loss
        everyone = list(range(len(parts)))
        random_after = random_states()
        restore_random_states(random_before)  # the same dropout
        try:
            # Where each gradient is finite, it is their sum that is not.
            return [number for number, part in enumerate(parts) if not self._is_finite(part)] or everyone
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return everyone
        finally:
            self.drop()
            restore_random_states(random_after)

    def drop(self) -> None:
        """Forget the gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def _noise_of(self, parts: Sequence[Part], norms: GradientNorms) -> NoiseMeasurement | None:
        scale = self._scaler.get_scale()  # of the loss; 1.0 where it is not scaled
        *of_groups, of_sum = (squared / scale**2 for squared in norms.squared())
        return measure(
            squared_sum=of_sum,
            squared_shares=of_groups,
            weights=[int(self._job.rows.num_supervised[self._rows_of(part)].sum()) for part in parts],
            num_rows=len(self._indices),
        )

    def _rows_of(self, part: Part) -> NDArray[np.intp]:
        """Positions among the job's rows."""
        return self._indices[part.micro_batch.rows]

    def _is_finite(self, part: Part) -> bool:
        self.drop()
        self._backward(self._rows_of(part))
        return all(bool(p.grad.isfinite().all()) for p in self._parameters if p.grad is not None)

    def _backward(self, rows: NDArray[np.intp]) -> Tensor:
        """Add the gradient of one micro-batch; its part of the batch's mean loss, a scalar."""
        self._last = rows
        return self._pass(rows, self._num_supervised, step=self._number)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "oom":
            event = {**event, "rows": [int(key) for key in self._job.rows.keys[self._last]]}
        self._on_event(event)
