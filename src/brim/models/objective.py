"""What a model learns: an objective turns a micro-batch into a loss sum.

The loop divides the sums of an effective batch once by its supervised tokens, so a gradient does not depend on how the
batch was cut. Legend: B rows, T tokens, S supervised tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from brim.models.chunked_loss import chunked_loss_sum, chunked_scores
from brim.models.logit_head import LogitHead


class TokenBatch(Protocol):
    """Right-padded rows, and where their supervised tokens are predicted (see data/collate.py)."""

    @property
    def input_ids(self) -> Tensor: ...  # [B, T] int64

    @property
    def targets(self) -> Tensor: ...  # [S] int64

    @property
    def target_rows(self) -> Tensor: ...  # [S] int64

    @property
    def logit_positions(self) -> Tensor: ...  # [S] int64, among B × num_logits

    @property
    def num_logits(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Sums over the supervised tokens of each row, on the device."""

    loss: Tensor  # [B] float64 where the device has it, nats
    num_correct: Tensor  # [B] int64: the most probable token is the target
    num_supervised: Tensor  # [B] int64


def next_token_loss(
    model: nn.Module, batch: TokenBatch, *, head: LogitHead | None = None, gradient_scale: Tensor | None = None
) -> Tensor:
    """Cross-entropy summed over the supervised tokens of a micro-batch, in fp32: a scalar, in nats.

    head: the model's (`logit_head`), to do it in chunks; None: all logits stand at once.
    gradient_scale: where arithmetic is fp16 and the loss is scaled, all that this sum is multiplied by before the
    backward pass; chunks compute their gradients before it.
    """
    if head is not None:
        return chunked_loss_sum(
            _target_hidden(head, batch),
            head.projection.weight,
            head.projection.bias,
            batch.targets,
            transform=head.transform,
            gradient_scale=gradient_scale,
        )
    return cross_entropy(target_logits(model, batch).float(), batch.targets, reduction="sum")


def next_token_scores(model: nn.Module, batch: TokenBatch, *, head: LogitHead | None = None) -> RowScores:
    """Loss and hits by row, for evaluation, without gradients. head: as in `next_token_loss`."""
    losses, hits = _whole_scores(model, batch) if head is None else _chunked_scores(head, batch)
    num_rows = batch.input_ids.shape[0]
    zeros = torch.zeros(num_rows, device=losses.device, dtype=torch.int64)
    return RowScores(
        loss=_row_sums(losses, batch, num_rows),
        num_correct=zeros.index_add(0, batch.target_rows, hits),
        num_supervised=zeros.index_add(0, batch.target_rows, torch.ones_like(hits)),
    )


def _row_sums(losses: Tensor, batch: TokenBatch, num_rows: int) -> Tensor:
    """[B], each row's tokens in their order: sums into one place would be in any order on a GPU."""
    wide = torch.float32 if losses.device.type == "mps" else torch.float64
    by_position = torch.zeros(num_rows * batch.num_logits, device=losses.device, dtype=wide)
    by_position = by_position.index_copy(0, batch.logit_positions, losses.to(wide))
    return by_position.view(num_rows, batch.num_logits).sum(dim=1)


def target_logits(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Logits [S, V] at the positions that predict the supervised tokens.

    No attention mask is passed: rows are padded on the right and attention is causal, so no real token sees padding,
    and without a mask the fast attention kernels can be used.
    """
    options = {"logits_to_keep": batch.num_logits} if _keeps_logits(model) else {}
    logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **options).logits
    return logits[:, -batch.num_logits :].flatten(0, 1).index_select(0, batch.logit_positions)


def _whole_scores(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Loss [S] and hits [S] of each supervised token."""
    logits = target_logits(model, batch)
    losses = cross_entropy(logits.float(), batch.targets, reduction="none")
    return losses, (logits.argmax(dim=-1) == batch.targets).long()


def _chunked_scores(head: LogitHead, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    scores = chunked_scores(
        _target_hidden(head, batch),
        head.projection.weight,
        head.projection.bias,
        batch.targets,
        transform=head.transform,
    )
    return scores.loss, scores.is_correct.long()


def _target_hidden(head: LogitHead, batch: TokenBatch) -> Tensor:
    """What the head is given [S, D] at the positions that predict the supervised tokens."""
    hidden = head.hidden(batch.input_ids)
    return hidden[:, -batch.num_logits :].flatten(0, 1).index_select(0, batch.logit_positions)


def _keeps_logits(model: nn.Module) -> bool:
    """Whether the architecture can leave out the logits of a row's first tokens, as most of transformers' can."""
    get_base_model: Any = getattr(model, "get_base_model", None)  # PEFT's wrapper hides the signature
    architecture: type = type(get_base_model() if get_base_model else model)
    return "logits_to_keep" in _parameters(architecture)


@cache
def _parameters(architecture: type) -> frozenset[str]:
    return frozenset(inspect.signature(architecture.forward).parameters)  # type: ignore[attr-defined]
