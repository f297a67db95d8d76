"""Losses and hits of a model over rows, in one forward pass each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from brim.data import TokenRows
from brim.data.collate import collate
from brim.infer.rows_at_once import Batches, batches, longest_first
from brim.models.logit_head import LogitHead
from brim.models.objective import next_token_scores
from brim.models.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Sums over the supervised tokens of each row, in the order of the rows."""

    keys: NDArray[np.int64]  # row numbers in the data
    loss: NDArray[np.float64]  # nats
    num_correct: NDArray[np.int64]  # tokens that the model finds most probable
    num_supervised: NDArray[np.int64]


def score_rows(
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_id: int,
    batch_rows: int | Batches,
    device: torch.device,
    precision: Precision,
    head: LogitHead | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> Scores:
    """Score each row under teacher forcing, without gradients; the model's training mode is left as it was.

    Rows of like length share a batch, and fewer of them once memory has run out. Logits are reduced where they arise;
    in chunks, where the model's head is given. on_batch: told how many more rows are done.
    Raises OutOfMemoryError when a row alone runs out of memory.
    """
    num_rows = len(rows)
    loss = np.zeros(num_rows)
    num_correct, num_supervised = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)

    def score(positions: NDArray[np.intp]) -> None:
        batch = collate([rows[int(i)] for i in positions], pad_id=pad_id).to(device)
        with torch.no_grad(), precision.autocast(device, keeps_copies=False):
            scores = next_token_scores(model, batch, head=head)
        loss[positions] = scores.loss.cpu().numpy()
        num_correct[positions] = scores.num_correct.cpu().numpy()
        num_supervised[positions] = scores.num_supervised.cpu().numpy()
        on_batch(len(positions))

    was_training = model.training
    model.eval()
    try:
        batches(batch_rows).run(rows, longest_first(rows), score, doing="evaluation")
    finally:
        model.train(was_training)
    return Scores(keys=np.asarray(rows.keys), loss=loss, num_correct=num_correct, num_supervised=num_supervised)
