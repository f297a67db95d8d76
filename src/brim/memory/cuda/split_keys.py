"""The buffers of FlashAttention's forward pass when it splits the keys, as it does with few queries.

After num_splits_heuristic and set_params_splitkv in flash_api.cpp, the same in PyTorch and in the flash-attn package.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from brim.memory.cuda.target import CudaTarget


def split_buffers(
    rows: int, heads: int, queries: int, keys: int, head_dim: int, *, dropout: float, like: Tensor, target: CudaTarget
) -> tuple[Tensor, ...]:
    """Partial outputs and their log-sum-exps in fp32; none where the keys are not split."""
    if dropout > 0 or target.multiprocessors is None:
        return ()
    splits = num_splits(
        rows * heads * math.ceil(queries / 64),
        2 * target.multiprocessors,  # two blocks of 128 threads each
        math.ceil(keys / (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64)),
    )
    if splits == 1:
        return ()
    rounded = math.ceil(head_dim / 32) * 32
    return (
        like.new_empty((splits, rows, heads, queries), dtype=torch.float32),
        like.new_empty((splits, rows, heads, queries, rounded), dtype=torch.float32),
    )


def num_splits(blocks: int, slots: int, key_blocks: int) -> int:
    """The fewest splits that come within 85% of the best use of the device.

    blocks: of queries, over rows and heads; slots: blocks that run at a time; key_blocks: that can be split.
    """
    if blocks >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    use = {n: (blocks * n / slots) / math.ceil(blocks * n / slots) for n in eligible}
    best = max(use.values(), default=0.0)
    return next((n for n in eligible if use[n] >= 0.85 * best), 1)
