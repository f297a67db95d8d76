"""Token rows as padded tensors; targets go by position, so the padding token may equal EOS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from brim.data.rows import TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded rows to learn from. B rows, T tokens of the longest, S supervised tokens.

    No attention mask: with causal attention a token sees only what stands before it, and padding stands behind.
    Where the targets are is worked out here, on the CPU, so that a GPU need not be waited for.
    """

    input_ids: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [S] int64: the supervised tokens
    target_rows: torch.Tensor  # [S] int64: the row of each
    logit_positions: torch.Tensor  # [S] int64: which of the B × num_logits positions predicts each
    num_logits: int  # logits are needed at this many positions, the last ones: before them, all rows are prompt

    def to(self, device: torch.device) -> Batch:
        return Batch(
            input_ids=_move(self.input_ids, device),
            targets=_move(self.targets, device),
            target_rows=_move(self.target_rows, device),
            logit_positions=_move(self.logit_positions, device),
            num_logits=self.num_logits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Left-padded prompts to continue. B rows, T tokens of the longest."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64; 1 on the prompt

    def to(self, device: torch.device) -> PromptBatch:
        return PromptBatch(input_ids=_move(self.input_ids, device), attention_mask=_move(self.attention_mask, device))


def collate(rows: Iterable[TokenRow], *, pad_id: int) -> Batch:
    """Rows padded on the right to the longest. A row's first token has nothing before it and is never a target."""
    rows = list(rows)
    input_ids = np.full((len(rows), _longest(rows)), pad_id, dtype=np.int64)
    supervised = np.zeros(input_ids.shape, dtype=np.bool_)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[number, :length] = row.input_ids
        supervised[number, 1:length] = row.supervised[1:]
    target_rows, target_columns = np.nonzero(supervised)
    before = target_columns - 1  # a token is predicted at the position before it
    first = int(before.min()) if len(before) else 0
    num_logits = input_ids.shape[1] - first
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(input_ids[target_rows, target_columns]),
        target_rows=torch.from_numpy(target_rows.astype(np.int64)),
        logit_positions=torch.from_numpy((target_rows * num_logits + before - first).astype(np.int64)),
        num_logits=num_logits,
    )


def collate_prompts(rows: Iterable[TokenRow], *, pad_id: int) -> PromptBatch:
    """The tokens of each row before its first supervised one, padded on the left to the longest."""
    prompts = [row.input_ids[: row.num_prompt_tokens] for row in rows]
    longest = max((len(prompt) for prompt in prompts), default=0)
    input_ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for number, prompt in enumerate(prompts):
        start = longest - len(prompt)
        input_ids[number, start:] = prompt
        attention_mask[number, start:] = 1
    return PromptBatch(input_ids=torch.from_numpy(input_ids), attention_mask=torch.from_numpy(attention_mask))


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that a CUDA stream makes by itself while the CPU goes on."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _longest(rows: list[TokenRow]) -> int:
    return max((len(row.input_ids) for row in rows), default=0)
