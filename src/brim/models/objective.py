"""What a model learns: an objective turns a micro-batch into a loss sum and its weight.

The loop divides the sums of an effective batch once by its weight, so a gradient does not depend on how the batch
was cut. Legend: B rows, T tokens, S supervised tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100


class TokenBatch(Protocol):
    """Right-padded rows."""

    @property
    def input_ids(self) -> Tensor: ...  # [B, T] int64

    @property
    def labels(self) -> Tensor: ...  # [B, T] int64; IGNORED where there is nothing to learn


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Sums over the supervised tokens of each row, on the device."""

    loss: Tensor  # [B] float64, nats
    num_correct: Tensor  # [B] int64: the most probable token is the target
    num_supervised: Tensor  # [B] int64


def next_token_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Cross-entropy summed over the supervised tokens of a micro-batch, in fp32: a scalar, in nats.

    Its weight is the number of supervised tokens, which the rows know without the device.
    """
    logits, targets, _ = _supervised(model, batch)
    return cross_entropy(logits.float(), targets, reduction="sum")


def next_token_scores(model: nn.Module, batch: TokenBatch) -> RowScores:
    """Loss and hits by row, for evaluation."""
    logits, targets, row = _supervised(model, batch)
    losses = cross_entropy(logits.float(), targets, reduction="none").double()
    hits = (logits.argmax(dim=-1) == targets).long()
    num_rows = batch.input_ids.shape[0]
    zeros = torch.zeros(num_rows, device=row.device)
    return RowScores(
        loss=zeros.double().index_add(0, row, losses),
        num_correct=zeros.long().index_add(0, row, hits),
        num_supervised=zeros.long().index_add(0, row, torch.ones_like(hits)),
    )


def _supervised(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [S, V], targets [S] and row numbers [S] of the supervised tokens alone.

    No attention mask is passed: rows are padded on the right and attention is causal, so no real token sees padding,
    and without a mask the fast attention kernels can be used.
    """
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
    targets = batch.labels[:, 1:]
    row, position = (targets != IGNORED).nonzero(as_tuple=True)
    return logits[row, position], targets[row, position], row
