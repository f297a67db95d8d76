"""One micro-batch through the model, forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brim.data import TokenRows
from brim.data.collate import collate
from brim.models.logit_head import LogitHead
from brim.models.objective import next_token_loss
from brim.models.precision import Precision
from brim.models.row_dropout import RowDropout


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPass:
    """What a training step does with some rows; gradients are added to those that the weights have."""

    model: nn.Module
    head: LogitHead | None  # the loss is computed in chunks; None: all logits stand at once
    rows: TokenRows
    pad_id: int
    device: torch.device
    precision: Precision
    scaler: torch.amp.GradScaler  # of the loss, where arithmetic is fp16; not enabled elsewhere
    row_dropout: RowDropout | None = None  # of the model

    def __call__(self, rows: NDArray[np.intp], num_supervised: int, *, step: int) -> Tensor:
        """Add the rows' gradient; their part of the mean loss over `num_supervised` tokens, a scalar on the device.

        rows: positions among all rows. num_supervised: supervised tokens of the whole effective batch. step: its
        number, for the dropout.
        """
        batch = collate([self.rows[int(i)] for i in rows], pad_id=self.pad_id).to(self.device)
        with self._dropout_of(rows, step):
            with self.precision.autocast(self.device):
                loss = next_token_loss(
                    self.model, batch, head=self.head, gradient_scale=self._gradient_scale(num_supervised)
                )
                loss = loss / num_supervised
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _dropout_of(self, rows: NDArray[np.intp], step: int) -> AbstractContextManager[None]:
        """The backward pass is in it, too: checkpointed activations are computed once more, with the same masks."""
        if self.row_dropout is None:
            return nullcontext()
        keys, lengths = self.rows.keys[rows].tolist(), self.rows.lengths[rows].tolist()
        return self.row_dropout.of_rows(keys, lengths, step=step)

    def _gradient_scale(self, num_supervised: int) -> Tensor | None:
        """What the backward pass multiplies the loss sum's gradient by, where fp16 needs to know it beforehand."""
        if not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self.device)) / num_supervised
