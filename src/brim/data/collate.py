"""Token rows as padded tensors; masks go by position, so the padding token may equal EOS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from brim.data.rows import TokenRow

IGNORED = -100  # the label that a loss leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded rows to learn from. B rows, T tokens of the longest.

    No attention mask: with causal attention a token sees only what stands before it, and padding stands behind.
    """

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64; IGNORED where nothing is to be learned. Not shifted.

    def to(self, device: torch.device) -> Batch:
        return Batch(input_ids=self.input_ids.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Left-padded prompts to continue. B rows, T tokens of the longest."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64; 1 on the prompt

    def to(self, device: torch.device) -> PromptBatch:
        return PromptBatch(input_ids=self.input_ids.to(device), attention_mask=self.attention_mask.to(device))


def collate(rows: Iterable[TokenRow], *, pad_id: int) -> Batch:
    """Rows padded on the right to the longest; labels on supervised tokens only."""
    rows = list(rows)
    input_ids = np.full((len(rows), _longest(rows)), pad_id, dtype=np.int64)
    labels = np.full_like(input_ids, IGNORED)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[number, :length] = row.input_ids
        labels[number, :length] = np.where(row.supervised, row.input_ids, IGNORED)
    return Batch(input_ids=torch.from_numpy(input_ids), labels=torch.from_numpy(labels))


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


def _longest(rows: list[TokenRow]) -> int:
    return max((len(row.input_ids) for row in rows), default=0)
