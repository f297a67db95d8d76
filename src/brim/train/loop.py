"""The training loop: for each step, take an effective batch, cut it, sum its gradient, update once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from brim.batching.microbatch import cut_by_rows
from brim.batching.random_states import random_states, restore_random_states
from brim.config import GradientClippingConfig
from brim.data import TokenRows
from brim.data.collate import collate
from brim.data.order import rows_of_step
from brim.errors import Interrupted, Problem
from brim.models.device import peak_bytes
from brim.models.logit_head import LogitHead
from brim.models.objective import next_token_loss
from brim.models.precision import Precision
from brim.train.checkpoint import Checkpoint, CheckpointStore
from brim.train.clipping import clip_gradients
from brim.train.learning_rate import LearningRate
from brim.train.length import RunLength
from brim.train.nonfinite import MOST_IN_A_ROW, NotFinite
from brim.train.observer import Observer
from brim.train.optimizer import set_learning_rate
from brim.train.state import TrainState
from brim.train.tensors import (
    optimizer_state,
    restore_optimizer,
    restore_weights,
    trained_weights,
)

Metrics = Mapping[str, float]
Evaluate = Callable[[], Mapping[str, Metrics]]  # split -> its metrics
SyncLogs = Callable[[], Mapping[str, Any]]  # what is to be known of the logs, as JSON, once they are on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Which validation metric counts, and how many evaluations without improvement end the run."""

    metric: str = "loss"
    higher_is_better: bool = False
    patience: int = -1  # evaluations; -1: never

    def is_over(self, state: TrainState) -> bool:
        return 0 <= self.patience <= state.evaluations_without_improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """All that a run is made of."""

    model: nn.Module
    head: LogitHead | None  # the loss is computed in chunks; None: all logits stand at once
    rows: TokenRows
    pad_id: int
    device: torch.device
    precision: Precision
    optimizer: Optimizer
    learning_rate: LearningRate
    length: RunLength
    micro_batch_rows: int
    clipping: GradientClippingConfig | None
    on_nonfinite: Literal["stop", "skip"]
    seed: int
    evaluate: Evaluate | None
    stopping: Stopping
    store: CheckpointStore
    observer: Observer
    sync_logs: SyncLogs = dict  # before a checkpoint is written, which a resumed run goes by
    settings: Mapping[str, Any] = field(default_factory=dict)  # kept with each checkpoint, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """What is known of one after its backward pass."""

    rows: NDArray[np.intp]  # positions among the job's rows
    num_supervised: int  # tokens of the whole effective batch
    loss: Tensor  # its part of the batch's mean, a scalar


class Loop:
    """One run of a job, from a state on."""

    def __init__(self, job: TrainJob, state: TrainState) -> None:
        self._job = job
        self.state = state
        self._parameters = [p for p in job.model.parameters() if p.requires_grad]
        self._scaler = torch.amp.GradScaler(job.device.type, enabled=job.precision.scales_loss)
        self._saved_step = state.step if state.step else None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put weights, optimizer, random states and loss scale back to where the checkpoint left them."""
        job = self._job
        restore_weights(job.model, checkpoint.tensors["model"])
        restore_optimizer(job.optimizer, checkpoint.tensors.get("optimizer", {}), checkpoint.state["optimizer"])
        restore_random_states(checkpoint.tensors["random"])
        if job.precision.scales_loss:
            self._scaler.load_state_dict(self.state.loss_scaler)

    def run(self, stop: threading.Event) -> None:
        """Train to the run's end. Raises Interrupted, with the state saved, once `stop` is set."""
        job, state = self._job, self.state
        while state.step < job.length.total_steps and not job.stopping.is_over(state):
            job.observer.write(self._step())
            if job.length.is_checkpoint(state.step):
                self._evaluate()
                self._save()
            if stop.is_set():
                self._save()
                raise Interrupted(Problem(what=f"stopped after step {state.step}", fix="continue with --resume"))

    def _step(self) -> dict[str, Any]:
        """One update on one effective batch; its record."""
        job, state = self._job, self.state
        started = time.perf_counter()
        size = job.length.effective_batch_size
        _, indices = rows_of_step(
            num_rows=len(job.rows), seed=job.seed, consumed_samples=state.consumed_samples, size=size
        )
        learning_rate = job.learning_rate(consumed_samples=state.consumed_samples, batch_samples=len(indices))
        num_supervised = int(job.rows.num_supervised[indices].sum())
        random_before = random_states()
        loss, parts = self._accumulate(indices, num_supervised)
        not_finite = self._update(learning_rate, loss, parts, random_before)
        state.step += 1
        state.consumed_samples += len(indices)
        state.num_tokens += int(job.rows.lengths[indices].sum())
        state.num_supervised_tokens += num_supervised
        if not_finite is not None:
            return not_finite.record()
        return {
            "step": state.step,
            "split": "train",
            "loss": loss,
            "learning_rate": learning_rate,
            "effective_batch_size": len(indices),
            "num_micro_batches": len(parts),
            "num_samples": state.consumed_samples,
            "num_tokens": state.num_tokens,
            "num_supervised_tokens": state.num_supervised_tokens,
            "seconds": round(time.perf_counter() - started, 6),
            "peak_bytes": peak_bytes(job.device),
        }

    def _accumulate(self, indices: NDArray[np.intp], num_supervised: int) -> tuple[float, list[_MicroBatch]]:
        """The gradient of the batch's mean loss over supervised tokens; that loss, and the micro-batches it took."""
        job = self._job
        job.model.train()
        total = torch.zeros((), device=job.device)
        parts = []
        for positions in cut_by_rows(job.rows.lengths[indices], max_rows=job.micro_batch_rows):
            rows = indices[positions]
            loss = self._backward(rows, num_supervised)
            total += loss
            parts.append(_MicroBatch(rows=rows, num_supervised=num_supervised, loss=loss))
        return total.item(), parts

    def _backward(self, rows: NDArray[np.intp], num_supervised: int) -> Tensor:
        """Add the gradient of one micro-batch; its part of the batch's mean loss, a scalar."""
        job = self._job
        batch = collate([job.rows[int(i)] for i in rows], pad_id=job.pad_id).to(job.device)
        with job.precision.autocast(job.device):
            loss = next_token_loss(job.model, batch, head=job.head, gradient_scale=self._gradient_scale(num_supervised))
            loss = loss / num_supervised
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _gradient_scale(self, num_supervised: int) -> Tensor | None:
        """What the backward pass multiplies the loss sum's gradient by, where fp16 needs to know it beforehand."""
        if not self._scaler.is_enabled():
            return None
        return self._scaler.scale(torch.ones((), device=self._job.device)) / num_supervised

    def _update(
        self, learning_rate: float, loss: float, parts: Sequence[_MicroBatch], random_before: Mapping[str, Tensor]
    ) -> NotFinite | None:
        """Update the weights, or leave it out where loss or gradient are not finite. Raises BrimError to stop there."""
        job = self._job
        scales = self._scaler.is_enabled()
        norm = math.nan
        if math.isfinite(loss) or not scales:  # once unscaled, the scaler wants its step
            self._scaler.unscale_(job.optimizer)
            norm = float(clip_gradients(self._parameters, job.clipping))
        if not math.isfinite(loss) or (not math.isfinite(norm) and not scales):
            return self._leave_out(loss, norm, parts, random_before)
        self.state.num_skipped_in_a_row = 0
        set_learning_rate(job.optimizer, learning_rate)
        scale = self._scaler.get_scale()
        self._scaler.step(job.optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < scale:
            # fp16 gradients overflowed: the scaler left the update out and lowered its scale.
            job.observer.write({"step": self.state.step + 1, "event": "overflow", "loss_scale": scale})
        job.optimizer.zero_grad(set_to_none=True)
        return None

    def _leave_out(
        self, loss: float, norm: float, parts: Sequence[_MicroBatch], random_before: Mapping[str, Tensor]
    ) -> NotFinite:
        """Neither weights nor optimizer hear of this step. Raises BrimError where the run is to stop."""
        job, state = self._job, self.state
        job.optimizer.zero_grad(set_to_none=True)
        at_fault = self._at_fault(parts, random_before)
        rows = np.concatenate([parts[number].rows for number in at_fault])
        not_finite = NotFinite(
            step=state.step + 1,
            loss=loss,
            norm=norm,
            micro_batches=[number + 1 for number in at_fault],
            num_micro_batches=len(parts),
            rows=sorted(int(key) for key in job.rows.keys[rows]),
        )
        if job.on_nonfinite == "stop":
            raise not_finite.stop()
        state.num_skipped += 1
        state.num_skipped_in_a_row += 1
        if state.num_skipped_in_a_row == MOST_IN_A_ROW:
            raise not_finite.too_many()
        return not_finite

    def _at_fault(self, parts: Sequence[_MicroBatch], random_before: Mapping[str, Tensor]) -> list[int]:
        """The micro-batches whose loss is not finite; else those whose gradient is not, each replayed by itself.

        The losses were kept on the device, so that a step that is well is not held up by looking at each.
        """
        by_loss = [number for number, part in enumerate(parts) if not math.isfinite(part.loss.item())]
        if by_loss:
            return by_loss
        job = self._job
        by_gradient = []
        restore_random_states(random_before)  # the same dropout; and the states end where they were
        for number, part in enumerate(parts):
            self._backward(part.rows, part.num_supervised)
            if not all(bool(p.grad.isfinite().all()) for p in self._parameters if p.grad is not None):
                by_gradient.append(number)
            job.optimizer.zero_grad(set_to_none=True)
        return by_gradient or list(range(len(parts)))  # each is finite, and their sum is not

    def _evaluate(self) -> None:
        job, state = self._job, self.state
        if job.evaluate is None:
            return
        started = time.perf_counter()
        by_split = job.evaluate()
        seconds = round(time.perf_counter() - started, 6)
        for split, metrics in by_split.items():
            record = {"step": state.step, "split": split, **metrics, "seconds": seconds}
            # A step has a line with this split, too.
            job.observer.write({**record, "event": "evaluation"} if split == "train" else record)
        if "validation" in by_split:
            state.improve(by_split["validation"][job.stopping.metric], higher_is_better=job.stopping.higher_is_better)

    def _save(self) -> None:
        job, state = self._job, self.state
        if self._saved_step == state.step:
            return
        state.loss_scaler = self._scaler.state_dict()
        tensors, numbers = optimizer_state(job.optimizer)
        logs = job.sync_logs()
        job.store.save(
            state.step,
            tensors={"model": trained_weights(job.model), "optimizer": tensors, "random": random_states()},
            state={"train": state.as_dict(), "optimizer": numbers, "settings": job.settings, "logs": logs},
            best_step=state.best_step,
        )
        self._saved_step = state.step
        job.observer.write({"step": state.step, "event": "checkpoint"})
