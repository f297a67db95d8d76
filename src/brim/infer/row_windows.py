"""Attention of a step in parts: each few rows look at the columns that they themselves need.

All rows of a RowCache share one window of columns, from the first token of the longest row on; what a shorter row has
not is masked, and read all the same. On a CPU reading keys and values is what a step mostly does, so some calls more
over less memory are faster: with prompts of long-tailed lengths, by up to a quarter of
the whole time (benchmarks/inference.py).

Legend: n rows, H heads, W columns of the window, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS = 8  # looked at together: of 8, 16, 32 and 64 the fastest in one short, noisy trial; 16 is about as good


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Slots that are next to each other, and how many columns of the common window none of them needs."""

    slots: slice
    unneeded: int


def row_windows(starts: Sequence[int]) -> list[RowWindow]:
    """Every slot once, in order. starts: the column of each slot's first token."""
    base = min(starts)
    firsts = range(0, len(starts), _ROWS)
    parts = [slice(first, min(first + _ROWS, len(starts))) for first in firsts]
    return [RowWindow(part, min(starts[part]) - base) for part in parts]


@contextmanager
def attending_in_windows(starts: Sequence[int], device: torch.device) -> Iterator[None]:
    """Models whose attention is transformers' `sdpa` attend so while the context lasts; on a GPU nothing changes.

    There, reading is fast and each call has its price.
    """
    if device.type != "cpu" or len(starts) <= _ROWS:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attend
    token = _WINDOWS.set(row_windows(starts))
    try:
        yield
    finally:
        _WINDOWS.reset(token)
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


_WINDOWS: ContextVar[Sequence[RowWindow]] = ContextVar("row windows", default=())


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """query: [n, H, 1, D]. key, value: [n, heads of their own, W, D]. attention_mask: [n, 1, 1, W]; None: nothing."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def part(slots: slice, unneeded: int) -> Tensor:
        mask = None if attention_mask is None else attention_mask[slots, ..., unneeded:]
        attended: Tensor = sdpa_attention_forward(
            module, query[slots], key[slots, :, unneeded:], value[slots, :, unneeded:], mask, **more
        )[0]
        return attended

    windows = _WINDOWS.get()
    has_own_columns = more.get("position_bias") is not None or (
        attention_mask is not None and attention_mask.shape[0] != query.shape[0]
    )
    if not windows or windows[-1].slots.stop != query.shape[0] or query.shape[2] != 1 or has_own_columns:
        return part(slice(None), 0), None
    return torch.cat([part(window.slots, window.unneeded) for window in windows]), None
