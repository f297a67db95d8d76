"""Compare the attention of packed rows with the formula in fp64, row by row.

Legend: H query heads, K key and value heads, T tokens of a row, N of all rows, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import Case, Figures, Options
from benchmarks.gpu.subject import SEED
from brim.models.packing import PackedAttention, packed_rows

# Rounding makes about half of these: outputs, probabilities and their gradients are rounded to 8 and 11 bits.
_TOLERANCES: Mapping[torch.dtype, float] = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attention_cases(options: Options) -> Iterator[Case]:
    window = 8 if options.small else 100
    for dtype, size, key_heads, width in product(_TOLERANCES, (64, 128), (8, 2), (None, window)):
        heads = "each its own keys" if key_heads == 8 else "grouped queries"
        name = f"attention of packed rows, {str(dtype)[6:]}, head size {size}, {heads}"
        tolerance = _TOLERANCES[dtype]
        yield Case(
            name=name + ("" if width is None else f", window {width}"),
            run=partial(attention_errors, options, dtype=dtype, head_size=size, key_heads=key_heads, window=width),
            passes=partial(_attends, options, tolerance),
            expects=f"output and gradients of each row as in fp64, to {tolerance:g}; on CUDA by PyTorch's kernel",
        )


def _attends(options: Options, tolerance: float, found: Figures) -> bool:
    by_kernel = found["kernel_calls"] == (1 if options.is_cuda else 0)
    return bool(by_kernel and max(found[name] for name in ("output", "query", "key", "value")) <= tolerance)


class _Attending(nn.Module):
    """Stand for the attention layer of a model: what transformers' registry hands to its functions."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation_internal="sdpa")
        self.num_key_value_groups, self.is_causal = groups, True


def attention_errors(
    options: Options, *, dtype: torch.dtype, head_size: int, key_heads: int, window: int | None, heads: int = 8
) -> Figures:
    """Return the largest relative error of any row, of the output and of each gradient."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lengths = (1, 9, 33, 20) if options.small else (1, 37, 300, 129, 640)
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(options.device, dtype)

    shapes = [(1, number, sum(lengths), head_size) for number in (heads, key_heads, key_heads)]
    inputs = [drawn(*shape).requires_grad_() for shape in shapes]
    direction = drawn(1, sum(lengths), heads, head_size)
    rows = packed_rows(lengths)
    rows = replace(rows, position_ids=rows.position_ids.to(options.device), bounds=rows.bounds.to(options.device))
    module = _Attending(heads // key_heads)
    attention = PackedAttention(module, is_cuda=options.is_cuda)
    with attention.of(rows), _counting_kernel() as calls:
        attend: Any = ALL_ATTENTION_FUNCTIONS["brim_packed"]
        output = attend(module, *inputs, None, sliding_window=window)[0]
        gradients = torch.autograd.grad(output, inputs, direction)
    found = [output.transpose(1, 2), *gradients]
    errors = _errors_by_row(found, inputs, direction.transpose(1, 2), lengths, window)
    return {**dict(zip(("output", "query", "key", "value"), errors, strict=True)), "kernel_calls": len(calls)}


def _errors_by_row(
    found: Sequence[Tensor], inputs: Sequence[Tensor], direction: Tensor, lengths: Sequence[int], window: int | None
) -> list[float]:
    """Compare with fp64, row by row; a row whose gradient is 0 is measured by what rows have in the mean."""
    exact: list[list[Tensor]] = []
    split = [torch.split(each.detach().double(), list(lengths), dim=2) for each in (*inputs, direction)]
    for *row, of_row in zip(*split, strict=True):
        leaves = [each.requires_grad_() for each in row]
        output = exact_attention(*leaves, window=window)
        exact.append([output.detach(), *torch.autograd.grad(output, leaves, of_row)])
    errors = []
    for which, tensor in enumerate(found):
        whole = float(sum(float(row[which].square().sum()) for row in exact))
        worst = 0.0
        for part, row in zip(torch.split(tensor.detach().double(), list(lengths), dim=2), exact, strict=True):
            usual = whole * part.shape[2] / sum(lengths)
            size = max(float(row[which].square().sum()), usual) ** 0.5
            worst = max(worst, float((part - row[which]).norm()) / size)
        errors.append(worst)
    return errors


def exact_attention(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> Tensor:
    """Attend by the formula: query [1, H, T, D], key and value [1, K, T, D]. A token sees `window` at most."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    return torch.matmul(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), value)


@contextmanager
def _counting_kernel() -> Iterator[list[None]]:
    """Note each call of PyTorch's attention for rows of several lengths; its signature stays visible."""
    from torch.nn.attention import varlen

    calls: list[None] = []
    kernel = varlen.varlen_attn

    @functools.wraps(kernel)
    def noting(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return kernel(*given, **named)

    with patch.object(varlen, "varlen_attn", noting):
        yield calls
