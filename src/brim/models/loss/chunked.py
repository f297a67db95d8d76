"""Compute the cross-entropy of a language model's head in chunks, so that logits are never whole in memory.

The chunks are of positions. Where gradients are wanted they are computed in the forward pass, chunk by chunk, while
the chunk's probabilities are available: the backward pass needs no logits, neither kept nor computed again, and the
head costs the three matrix products that it costs without chunks. Only plain operators, no shape that depends on a
value, nothing that waits for a GPU.

Legend: S supervised positions, R of them in a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Of a chunk's logits in fp32: 1,048 positions of a vocabulary of 32,000, 261 of 128,256.
CHUNK_BYTES = 128 << 20


# The head's weights are read once a chunk: below so many positions a matrix product waits for them. In 16 bits, an A100
# (312 TFLOP/s, 2.0 TB/s) balances at 156, a T4 at 203 and an H100 (990, 3.35) at 296.
FEWEST_ROWS = 256


# Where the head trains, each chunk reads and writes the sum of its gradients, too, 12 bytes a weight against 6 FLOPs a
# position: that takes as long as the products at 312 positions on an A100, a quarter of it at 1,248. Such a run keeps
# 12 bytes a weight and more, beside which larger chunks are small.
TRAINED_HEAD_FACTOR = 4


_ARE_FULL = ContextVar("_ARE_FULL", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """Say what follows an architecture's head: cap · tanh(scale · output / cap), or scale · output."""

    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Hold loss and hit of each supervised position."""

    loss: Tensor  # [S] float32 (float64 of float64), nats
    is_correct: Tensor  # [S] bool: the target is the most probable token


def chunk_rows(vocabulary_size: int, *, head_trains: bool) -> int:
    """Return the most positions whose logits are in memory at once."""
    factor = TRAINED_HEAD_FACTOR if head_trains else 1
    return factor * max(FEWEST_ROWS, CHUNK_BYTES // (4 * vocabulary_size))


@contextmanager
def fullest_chunks() -> Iterator[None]:
    """Make all chunks but the last full, not of one size, so that one more never lowers the peak: for traces.

    The peak is never lower than with chunks of one size, and grows linearly.
    """
    token = _ARE_FULL.set(True)
    try:
        yield
    finally:
        _ARE_FULL.reset(token)


def chunked_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: LogitTransform = LogitTransform(),
    gradient_scale: Tensor | None = None,
    most_rows: int | None = None,
) -> Tensor:
    """Sum the cross-entropy over positions: a scalar in nats, with gradients for hidden, weight and bias.

    hidden: [S, D]. weight: [V, D]. bias: [V]. targets: [S] int64.
    gradient_scale: a scalar that the gradient of this sum will be about as large as, where its products are computed in
    fp16: probabilities below 6e-8 are 0 there unless they are multiplied before they are rounded, as the loss scale
    does without chunks. With the loss scale times all that the sum is multiplied by, both round alike, and overflow
    alike, which the scaler must see. None: 1.
    most_rows: positions in a chunk; None: `chunk_rows`.
    """
    if most_rows is None:
        most_rows = chunk_rows(weight.shape[0], head_trains=weight.requires_grad)
    if not torch.is_grad_enabled():
        return chunked_scores(hidden, weight, bias, targets, transform=transform, most_rows=most_rows).loss.sum()
    total: Tensor = _ChunkedLossSum.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, transform, gradient_scale, most_rows
    )
    return total


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: LogitTransform = LogitTransform(),
    most_rows: int | None = None,
) -> TokenScores:
    """Return loss and hit of each position, without gradients. Shapes as in `chunked_loss_sum`."""
    rows = chunk_rows(weight.shape[0], head_trains=False) if most_rows is None else most_rows
    head = _Head(hidden, weight, bias, transform)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        parts = _LossParts(hidden.shape[0], head)
        hits = torch.empty_like(targets, dtype=torch.bool)
        for chunk in _chunks(hidden.shape[0], rows):
            _chunk_hits(head, parts, chunk, targets[chunk], hits[chunk])
        return TokenScores(loss=parts.losses(), is_correct=hits)


class _ChunkedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        gradient_scale: Tensor | None,
        most_rows: int,
    ) -> Tensor:
        head = _Head(hidden, weight, bias, transform)
        chunks = list(_chunks(hidden.shape[0], most_rows))
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _Gradients(head, *ctx.needs_input_grad[:3], num_chunks=len(chunks))
            parts = _LossParts(hidden.shape[0], head)
            for chunk in chunks:
                _chunk_gradients(head, parts, gradients, chunk, targets[chunk], gradient_scale)
        ctx.gradients, ctx.gradient_scale = gradients.of_inputs(), gradient_scale
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        return parts.losses().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *of_output: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the gradients are handed on, not kept: a second backward pass has none"
        factor = of_output[0] if ctx.gradient_scale is None else of_output[0] / ctx.gradient_scale
        scaled = [
            None if each is None else each.to(torch.promote_types(each.dtype, dtype)).mul_(factor).to(dtype)
            for each, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return (*scaled, None, None, None, None)


class _Head:
    """Compute a head's matrix product in the dtype that it has without chunks; its logits in fp32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> None:
        narrow = weight.dtype
        device = hidden.device.type
        if narrow != torch.float64 and torch.is_autocast_enabled(device):
            narrow = torch.get_autocast_dtype(device)
        self.narrow = narrow
        self.wide = torch.promote_types(narrow, torch.float32)
        self.hidden, self.weight = hidden.to(narrow), weight.to(narrow)
        self._bias = None if bias is None else bias.to(narrow)
        self._transform = transform

    def logits(self, chunk: slice) -> Tensor:
        """Return [R, V], wide; the caller may write into them."""
        logits = nn.functional.linear(self.hidden[chunk], self.weight, self._bias).to(self.wide)
        scale, cap = self._transform.scale, self._transform.cap
        if cap is not None:
            return logits.mul_(scale / cap).tanh_().mul_(cap)
        return logits if scale == 1 else logits.mul_(scale)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return the logits' derivative with respect to the matrix product: [R, V], or one for all; None for 1."""
        scale, cap = self._transform.scale, self._transform.cap
        if cap is None:
            return None if scale == 1 else scale
        return logits.div(cap).square_().neg_().add_(1).mul_(scale)


class _Gradients:
    """Add up gradients of the loss sum over chunks; only those that are needed."""

    def __init__(self, head: _Head, hidden: bool, weight: bool, bias: bool, *, num_chunks: int) -> None:
        self._head = head
        self._hidden = torch.empty_like(head.hidden) if hidden else None
        # A sum of chunks in 16 bits would lose the small ones; a single chunk's product is what it is without chunks.
        dtype = head.wide if num_chunks > 1 else head.narrow
        self._weight = torch.zeros_like(head.weight, dtype=dtype) if weight else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.wide) if bias else None

    def add(self, chunk: slice, of_logits: Tensor) -> None:
        """Add the gradients of a chunk. of_logits: [R, V], wide."""
        narrow = of_logits.to(self._head.narrow)
        if self._hidden is not None:
            torch.mm(narrow, self._head.weight, out=self._hidden[chunk])
        if self._weight is not None:
            self._add_weight(narrow, self._head.hidden[chunk])
        if self._bias is not None:
            self._bias += of_logits.sum(dim=0)

    def of_inputs(self) -> list[Tensor | None]:
        return [self._hidden, self._weight, self._bias]

    def _add_weight(self, of_logits: Tensor, hidden: Tensor) -> None:
        assert self._weight is not None
        if self._weight.dtype == of_logits.dtype:
            self._weight.addmm_(of_logits.T, hidden)
            return
        # By parts of the vocabulary, since each product is rounded to 16 bits in a tensor of its own.
        for part in _chunks(self._weight.shape[0], max(FEWEST_ROWS, CHUNK_BYTES // (4 * hidden.shape[1]))):
            self._weight[part] += of_logits[:, part].T @ hidden


class _LossParts:
    """Gather what the losses are made of, in chunks, so that they are made all at once."""

    def __init__(self, num_positions: int, head: _Head) -> None:
        # [S, 1] each, less the largest logit of the position.
        self._sums = head.hidden.new_empty((num_positions, 1), dtype=head.wide)
        self._targets = torch.empty_like(self._sums)

    def take(self, chunk: slice, logits: Tensor, targets: Tensor) -> None:
        """Turn a chunk's logits [R, V] into probabilities, in place."""
        logits.sub_(logits.amax(dim=-1, keepdim=True))
        torch.gather(logits, 1, targets[:, None], out=self._targets[chunk])
        sums = self._sums[chunk]
        torch.sum(logits.exp_(), dim=-1, keepdim=True, out=sums)
        logits.div_(sums)

    def losses(self) -> Tensor:
        """Return the loss of each position, [S]; once."""
        return self._sums.log_().sub_(self._targets).squeeze(1)


# A function for a chunk, so that its logits are gone before the next one's are there.
def _chunk_gradients(
    head: _Head,
    parts: _LossParts,
    gradients: _Gradients,
    chunk: slice,
    targets: Tensor,
    gradient_scale: Tensor | None,
) -> None:
    """Take a chunk's part of the losses and of the gradients. targets: [R]."""
    logits = head.logits(chunk)
    slope = head.slope(logits)
    parts.take(chunk, logits, targets)
    of_logits = _minus_one_at(logits, targets)
    for factor in (slope, gradient_scale):
        if factor is not None:
            of_logits.mul_(factor)
    gradients.add(chunk, of_logits)


def _chunk_hits(head: _Head, parts: _LossParts, chunk: slice, targets: Tensor, hits: Tensor) -> None:
    """Take a chunk's part of the losses, and whether its targets [R] are the most probable tokens."""
    logits = head.logits(chunk)
    torch.eq(logits.argmax(dim=-1), targets, out=hits)
    parts.take(chunk, logits, targets)


def _chunks(num_rows: int, most_rows: int) -> Iterator[slice]:
    """Yield as few parts of `most_rows` at most as possible, of about one size."""
    if num_rows:
        rows = most_rows if _ARE_FULL.get() else math.ceil(num_rows / math.ceil(num_rows / most_rows))
        for start in range(0, num_rows, rows):
            yield slice(start, min(start + rows, num_rows))


def _minus_one_at(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Subtract 1 at the targets [R], in place: the loss's gradient with respect to the logits."""
    columns = targets[:, None]
    return probabilities.scatter_(1, columns, probabilities.gather(1, columns) - 1)
