"""How far one model's predictions are from another's, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brim.data import TokenRows
from brim.data.collate import collate
from brim.infer.rows_at_once import RowsAtOnce
from brim.models.objective import target_logits
from brim.models.precision import Precision

_MOST_TOKENS = 4096
_MOST_BYTES = 512 << 20  # of logits kept in main memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What separates two models, over the tokens that both predicted."""

    num_tokens: int
    mean_kl: float  # nats a token: what the second model's loss exceeds the first's by, were the first one the truth
    same_top: float  # share of tokens whose likeliest prediction is the same
    max_logit_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """How rows are run."""

    pad_id: int
    batch_rows: int
    device: torch.device


def logits_of(model: nn.Module, rows: TokenRows, how: Runner, precision: Precision) -> Iterator[Tensor]:
    """Logits [S, V], fp32 in main memory, of the supervised tokens, batch by batch in the order of the rows.

    After 4,096 tokens, or half a GiB, there are no more. A batch that runs out of memory is run in parts, and comes
    out as one. Raises OutOfMemoryError when a row alone runs out of memory.
    """
    left: int | None = None
    at_once = RowsAtOnce(how.batch_rows)
    for start in range(0, len(rows), how.batch_rows):
        parts: list[Tensor] = []

        def run(positions: NDArray[np.intp], parts: list[Tensor] = parts) -> None:
            nonlocal left
            batch = collate([rows[int(i)] for i in positions], pad_id=how.pad_id).to(how.device)
            with torch.no_grad(), precision.autocast(how.device, keeps_copies=False):
                logits = target_logits(model, batch)
            if left is None:
                left = max(1, min(_MOST_TOKENS, _MOST_BYTES // (4 * logits.shape[-1])))
            parts.append(logits[:left].float().cpu())
            left -= len(parts[-1])

        at_once.run(rows, np.arange(start, min(start + how.batch_rows, len(rows))), run, doing="evaluation")
        yield parts[0] if len(parts) == 1 else torch.cat(parts)
        if left == 0:
            return


def divergence(first: Sequence[Tensor], second: Iterator[Tensor]) -> Divergence:
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
    return Divergence(
        num_tokens=num_tokens,
        mean_kl=max(0.0, kl / num_tokens) if num_tokens and not math.isnan(kl) else math.nan,
        same_top=num_same / num_tokens if num_tokens else math.nan,
        max_logit_difference=largest,
    )
