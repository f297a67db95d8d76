"""Score rows in one forward pass each: losses and hits, means over supervised tokens.

How probable the model finds responses is computed by a pass over each prompt and its response, after all are written.
How far one model's predictions are from another's is computed on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brim.data.tokens import TokenRow, TokenRows, collate, pack
from brim.infer.engines import Batches, Response, RowsAtOnce, longest_first
from brim.infer.metrics.answers import Floats, Measure
from brim.models import Precision
from brim.models.loss import NextToken, target_logits
from brim.models.packing import PackedAttention, passing

_MOST_TOKENS = 4096


_MOST_BYTES = 512 << 20  # of logits kept in main memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Measure what separates two models, over the tokens that both predicted."""

    num_tokens: int
    mean_kl: float  # nats a token: what the second model's loss exceeds the first's by, were the first one the truth
    same_top: float  # share of tokens whose likeliest prediction is the same
    max_logit_difference: float

    # Bounds of how far merging may move predictions, in nats a token (docs/export.md has the reasons).
    MOST: ClassVar[float] = 0.01  # 1% of perplexity
    LEAST: ClassVar[float] = 0.001  # arithmetic in 16 bits costs as much in any case
    SHARE: ClassVar[float] = 0.1  # of what the adapter does

    @classmethod
    def limit_of(cls, adapter_kl: float | None) -> float:
        """Return how far merging may move predictions: a tenth of what the adapter does, from 0.001 to 0.01 nats.

        adapter_kl: how far the base without the adapter is from the model; where that is unknown, 0.01.
        """
        return cls.MOST if adapter_kl is None else min(cls.MOST, max(cls.LEAST, cls.SHARE * adapter_kl))

    @classmethod
    def between(cls, first: Sequence[Tensor], second: Iterator[Tensor]) -> Divergence:
        """Compare logits [S, V] of the same tokens, batch by batch; sums in fp64. NaN where either model gives NaN."""
        num_tokens = num_same = 0
        kl = largest = 0.0
        for one, other in zip(first, second, strict=True):
            log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (one, other))
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            difference = float((one - other).abs().max()) if len(one) else 0.0
            largest = difference if math.isnan(difference) else max(largest, difference)
            num_same += int((one.argmax(dim=-1) == other.argmax(dim=-1)).sum())
            num_tokens += len(one)
        return cls(
            num_tokens=num_tokens,
            mean_kl=max(0.0, kl / num_tokens) if num_tokens and not math.isnan(kl) else math.nan,
            same_top=num_same / num_tokens if num_tokens else math.nan,
            max_logit_difference=largest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Run rows through a model, some at a time."""

    pad_id: int
    batch_rows: int
    device: torch.device

    def adapter_kl(
        self, model: nn.Module, rows: TokenRows, precision: Precision, *, before: Sequence[Tensor]
    ) -> float | None:
        """Return how far the base alone is from the adapted model; None with trained biases: PEFT cannot take them off.

        before: the model's own logits of the rows.
        """
        adapted: Any = model
        if any(settings.bias != "none" for settings in adapted.peft_config.values()):
            return None
        flags = [(weight, weight.requires_grad) for weight in adapted.parameters()]
        try:
            with adapted.disable_adapter():
                return Divergence.between(before, self.logits(model, rows, precision)).mean_kl
        finally:
            for weight, is_trained in flags:  # PEFT lets all of the adapter's learn
                weight.requires_grad_(is_trained)

    def logits(self, model: nn.Module, rows: TokenRows, precision: Precision) -> Iterator[Tensor]:
        """Yield logits [S, V], fp32 in main memory, of the supervised tokens, batch by batch in the order of the rows.

        After 4,096 tokens, or half a GiB, there are no more. A batch that runs out of memory is run in parts, and comes
        out as one. Raises OutOfMemoryError when a row alone runs out of memory.
        """
        left: int | None = None
        at_once = RowsAtOnce(self.batch_rows)
        for start in range(0, len(rows), self.batch_rows):
            parts: list[Tensor] = []

            def run(positions: NDArray[np.intp], parts: list[Tensor] = parts) -> None:
                nonlocal left
                batch = collate(rows.take(positions), pad_id=self.pad_id).to(self.device)
                with torch.no_grad(), precision.autocast(self.device, keeps_copies=False):
                    logits = target_logits(model, batch)
                if left is None:
                    left = max(1, min(_MOST_TOKENS, _MOST_BYTES // (4 * logits.shape[-1])))
                parts.append(logits[:left].float().cpu())
                left -= len(parts[-1])

            at_once.run(rows, np.arange(start, min(start + self.batch_rows, len(rows))), run, doing="evaluation")
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
            if left == 0:
                return


_LARGEST = 700.0  # exp of more overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Hold sums over the supervised tokens of each row, in the order of the rows."""

    keys: NDArray[np.int64]  # row numbers in the data
    loss: NDArray[np.float64]  # nats
    num_correct: NDArray[np.int64]  # tokens that the model finds most probable
    num_supervised: NDArray[np.int64]

    def summary(self) -> dict[str, float]:
        """Return loss (nats per supervised token), perplexity, token and sequence accuracy, and what they are made of.

        Sequence accuracy is the share of rows of which every supervised token is the most probable one.
        """
        num_tokens = int(self.num_supervised.sum())
        loss = float(self.loss.sum()) / num_tokens
        return {
            "loss": loss,
            "perplexity": math.inf if loss > _LARGEST else math.exp(loss),
            "token_accuracy": int(self.num_correct.sum()) / num_tokens,
            "sequence_accuracy": float((self.num_correct == self.num_supervised).mean()),
            "num_rows": len(self.keys),
            "num_supervised_tokens": num_tokens,
        }

    def as_lists(self) -> list[list[float]]:
        """Return the columns as plain numbers, for `joined`."""
        return [column.tolist() for column in (self.keys, self.loss, self.num_correct, self.num_supervised)]

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Sequence[float]]], *, order: NDArray[np.intp]) -> Scores:
        """Join what `as_lists` gave of parts of the rows. order: the place of each row behind one another."""
        keys, loss, num_correct, num_supervised = (np.concatenate(column)[order] for column in zip(*parts, strict=True))
        whole = {"num_correct": num_correct.astype(np.int64), "num_supervised": num_supervised.astype(np.int64)}
        return cls(keys=keys.astype(np.int64), loss=loss, **whole)

    def measures(self) -> dict[str, Measure]:
        """Return the same figures, without what they are made of."""
        figures = self.summary()
        loss = Measure.ratio(self.loss, self.num_supervised)

        def perplexity(counts: Floats) -> Floats:
            losses = loss.of(counts)
            return np.where(losses > _LARGEST, math.inf, np.exp(np.minimum(losses, _LARGEST)))

        return {
            "loss": loss,
            "perplexity": Measure(value=figures["perplexity"], of=perplexity),
            "token_accuracy": Measure.ratio(self.num_correct, self.num_supervised),
            "sequence_accuracy": Measure.ratio(self.num_correct == self.num_supervised),
        }


def score_rows(
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_id: int,
    batches: Batches,
    device: torch.device,
    precision: Precision,
    objective: NextToken,
    packed: PackedAttention | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
    run: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> Scores:
    """Score each row under teacher forcing, without gradients; the model's training mode is left as it was.

    Rows of like length share a batch, and fewer of them once memory has run out. Logits are reduced where they arise;
    in chunks, where the objective has a head. packed: the attention of packed rows; None: rows are padded.
    on_batch: called with how many more rows are done. run: runs each pass.
    Raises OutOfMemoryError when a row alone runs out of memory.
    """
    num_rows = len(rows)
    loss = np.zeros(num_rows)
    num_correct, num_supervised = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)

    def score(positions: NDArray[np.intp]) -> None:
        batch = (collate if packed is None else pack)(rows.take(positions), pad_id=pad_id).to(device)
        with torch.no_grad(), passing(packed, batch.packed), precision.autocast(device, keeps_copies=False):
            scores = run(lambda: objective.scores(model, batch))
        loss[positions] = scores.loss.cpu().numpy()
        num_correct[positions] = scores.num_correct.cpu().numpy()
        num_supervised[positions] = scores.num_supervised.cpu().numpy()
        on_batch(len(positions))

    was_training = model.training
    model.eval()
    try:
        batches.run(rows, longest_first(rows), score, doing="evaluation")
    finally:
        model.train(was_training)
    return Scores(keys=np.asarray(rows.keys), loss=loss, num_correct=num_correct, num_supervised=num_supervised)


# Of a batch, padding included. A pass saturates a device at 1,000 to 4,000 tokens (DESIGN.md, where speed comes from).
# A plan lowers it only where memory holds less: which rows share a batch changes the last bits of their sums.
BATCH_TOKENS = 4096


_BLOCK_ROWS = 1024


def rows_to_score(prompts: TokenRows, response: Callable[[int], Response]) -> TokenRows:
    """Join each prompt with its response and the token that ended it; these are supervised."""
    return TokenRows.from_blocks(_batches(prompts, response))


def score_batches(lengths: NDArray[np.int64], *, most_tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.intp]]:
    """Yield positions of rows of like length, the longest first: rows × longest is at most `most_tokens`, or one row.

    They depend on the lengths alone.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, most_tokens // max(1, int(lengths[order[start]])))
        yield order[start:end]
        start = end


def _batches(prompts: TokenRows, response: Callable[[int], Response]) -> Iterator[list[TokenRow]]:
    for start in range(0, len(prompts), _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, len(prompts))
        yield [_joined(prompts[position], response(position)) for position in range(start, end)]


def _joined(prompt: TokenRow, response: Response) -> TokenRow:
    ending = [] if response.end_id is None else [response.end_id]
    written = np.asarray([*response.token_ids, *ending], dtype=np.int32)
    tokens = np.concatenate([prompt.input_ids, written])
    return replace(prompt, input_ids=tokens, supervised=np.arange(len(tokens)) >= len(prompt.input_ids))
