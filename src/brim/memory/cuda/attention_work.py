"""What an attention kernel that a stand-in stands for computes and moves."""

from __future__ import annotations

from torch import Tensor

from brim.memory.operator_work import attention_flops
from brim.memory.recorder import note_kernel


def note_attention(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Tensor,
    bias: Tensor | None = None,
    backward: bool = False,
) -> None:
    """One call. query: [B, H, T, D]; key, value: [B, K, S, D]; others: what it reads and writes besides.

    A language model's attention is causal: without a bias, where there are as many queries as keys, the kernel leaves
    out the scores of keys that come later.
    """
    causal = bias is None and query.shape[-2] == key.shape[-2]
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal, backward=backward)
    tensors = (query, key, value, *others) if bias is None else (query, key, value, bias, *others)
    note_kernel(operator, *tensors, flops=flops, unit="attention")
