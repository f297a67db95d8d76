"""Predict what the fused attention kernels of CUDA allocate: cuDNN's, the memory-efficient one, FlashAttention.

Legend: B rows, H query heads, K key and value heads, T queries, S keys, D head dimension. Values are not computed:
shapes, dtypes, layouts and lifetimes are right.

cuDNN as PyTorch's SDPA follows attention.cu, attention_backward.cu and native/cudnn/MHA.cpp of PyTorch. Its workspace
comes from the caching allocator: its front end (cudnn_frontend/node/scaled_dot_product_flash_attention.h,
get_fe_workspace_size_node) asks for dQ in fp32 and the row sums in the backward pass. What the closed library adds is
not published: for grouped queries we assume a dK and a dV with all query heads, which its reduction over the group
reads.

The memory-efficient kernel (CUTLASS, from xFormers) as PyTorch's SDPA follows attention.cu
(_efficient_attention_forward), attention_backward.cu and mem_eff_attention/kernel_backward.h of PyTorch. The scratch
space of its backward kernel follows Params::workspace_size in mem_eff_attention/kernel_backward.h, the kernels of
kernels/cutlassB.h in their order, and the splitting of the keys in attention_backward.cu.

FlashAttention as PyTorch's own SDPA kernel follows aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
(mha_fwd, mha_bwd), attention.cu and attention_backward.cu of PyTorch; D is a multiple of 8. The buffers of its
forward pass when it splits the keys, as it does with few queries, follow num_splits_heuristic and set_params_splitkv
in flash_api.cpp, the same in PyTorch and in the flash-attn package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from brim.memory.trace import attention_flops, note_kernel

_Arguments = ParamSpec("_Arguments")


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTarget:
    """Describe what decides which kernel CUDA runs."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int] = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))  # type: ignore[assignment]
    multiprocessors: int | None = None  # None: attention is not split over the keys (decoding, very short batches)
    # The questions that a trace has asked of the device, as (function, arguments without the target), and the answers.
    answers: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(capability: tuple[int, int] | None) -> CudaTarget | None:
        """Return the target of a device of this compute capability; None for that of a CPU, which has none."""
        return None if capability is None else CudaTarget(compute_capability=capability)

    @property
    def sm(self) -> int:
        """Return the architecture's number, such as 80 for compute capability 8.0."""
        return 10 * self.compute_capability[0] + self.compute_capability[1]

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that a trace depends on, for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def has_same_answers_on(self, other: CudaTarget) -> bool:
        """Return whether a trace for the other device would have been given the same answers throughout."""
        if replace(other, compute_capability=self.compute_capability) != self:
            return False
        return all(
            answer == function(*arguments, **dict(keywords), target=other)
            for (function, arguments, keywords), answer in self.answers.items()
        )


def record_answers(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Record each call and its answer in the target, the last argument; only such functions look at its capability."""

    @wraps(function)
    def ask(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Answer:
        answer = function(*arguments, **keywords)
        target: Any = keywords.get("target", arguments[-1] if arguments else None)
        others = tuple(each for each in arguments if each is not target)
        named = tuple((name, value) for name, value in keywords.items() if value is not target)
        target.answers[function, others, named] = answer
        return answer

    return ask


class CudnnKernel(torch.autograd.Function):
    """Stand in for aten::_scaled_dot_product_cudnn_attention on [B, H, T, D]; the bias is expanded, not copied."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, trains: bool) -> Tensor:
        rows, heads, queries, _ = query.shape
        seed = query.new_empty((), dtype=torch.int64)  # on the device, with and without dropout
        offset = query.new_empty((), dtype=torch.int64)
        out = like_layout_of(query, value.shape[-1])
        note_attention("cudnn_attention", query, key, value, out, bias=bias)
        if trains:
            log_sum_exp = query.new_empty((rows, heads, queries, 1), dtype=torch.float32)
            ctx.save_for_backward(query, key, value, bias, out, log_sum_exp, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, _, _, _ = ctx.saved_tensors
        rows, heads, queries, head_dim = query.shape
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        grad_out = grad if grad.stride(-1) == 1 else torch.empty_like(out)
        size = 4 * rows * heads * queries * (head_dim + 1)
        if key.shape[1] != heads:
            size += query.element_size() * rows * heads * key.shape[2] * (head_dim + value.shape[-1])
        workspace = query.new_empty((size,), dtype=torch.uint8)
        note_attention("cudnn_attention_backward", query, key, value, grad, out, dq, dk, dv, bias=bias, backward=True)
        del workspace, grad_out
        return dq, dk, dv, None, None


def like_layout_of(query: Tensor, width: int) -> Tensor:
    """Allocate [B, H, T, width], its dimensions ordered in memory as the query's (alloc_with_matching_layout)."""
    shape = (*query.shape[:-1], width)
    if tuple(query.shape) == shape:
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda dim: query.stride(dim) or float("inf"))
    strides, step = [0] * 4, 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


class EfficientKernel(torch.autograd.Function):
    """Stand in for aten::_scaled_dot_product_efficient_attention on [B, H, T, D]; the bias is [B, H, T, S]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        dropout: float,
        target: CudaTarget,
        trains: bool,
    ) -> Tensor:
        rows, heads, queries, _ = query.shape
        width = value.shape[-1]
        out = query.new_empty((rows, queries, heads, width))
        kept = round_up(queries, 32) if trains else 0
        log_sum_exp = query.new_empty((rows, heads, kept), dtype=torch.float32)
        if width > 128 and query.dtype != torch.float32:  # the output does not stay in registers: kernel_forward.h
            accumulated = query.new_empty((rows, queries, heads, width), dtype=torch.float32)
            del accumulated
        attention = out.transpose(1, 2)
        note_attention("efficient_attention", query, key, value, attention, bias=bias)
        ctx.save_for_backward(query, key, value, bias, attention, log_sum_exp)
        ctx.dropout, ctx.target = dropout, target
        return attention

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, attention, _ = ctx.saved_tensors
        grad_out = grad.transpose(1, 2).contiguous()
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        grad_bias = _gradient_of(bias) if ctx.needs_input_grad[3] else None
        delta = _delta(grad_out, attention.transpose(1, 2))
        size = workspace_bytes(
            rows=q.shape[0],
            heads=q.shape[2],
            queries=q.shape[1],
            keys=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
            dropout=ctx.dropout > 0,
            target=ctx.target,
        )
        workspace = q.new_empty((size,), dtype=torch.uint8) if size else None
        note_attention(
            "efficient_attention_backward", query, key, value, grad, attention, dq, dk, dv, bias=bias, backward=True
        )
        del delta, workspace
        return (*(each.transpose(1, 2) for each in (dq, dk, dv)), grad_bias, None, None, None)


def _gradient_of(bias: Tensor) -> Tensor:
    """Make the bias's gradient, whose last dimension is padded to a multiple of 16 elements."""
    *sizes, last = bias.shape
    return bias.new_empty((*sizes, round_up(last, 16)))[..., :last]


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return row sums of gradient × output, fp32 [B, H, T]; in half precision a kernel computes them, else PyTorch."""
    if grad_out.dtype == torch.float32:
        return (grad_out * out).sum(-1).transpose(-2, -1).contiguous()
    rows, queries, heads, _ = grad_out.shape
    return grad_out.new_empty((rows, heads, queries), dtype=torch.float32)


_SMALL_SHARED_MEMORY = (86, 87, 89, 120, 121)  # at most 99 KiB a block, too little for tiles of 128 × 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Describe the tiles into which a backward kernel divides the scores."""

    queries: int  # kBlockSizeI
    keys: int  # kBlockSizeJ
    widest: int | None  # kMaxK: the largest head dimension that it takes; None: any


@record_answers
def workspace_bytes(
    *,
    rows: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    dropout: bool,
    target: CudaTarget,
) -> int:
    """Return the bytes of the buffers that gradients are accumulated in, over rows and heads."""
    half = dtype != torch.float32
    tile = tile_of(max(head_dim, value_dim), half=half, dropout=dropout, target=target)
    in_registers = half and tile.widest is not None and tile.widest <= tile.queries
    elements = 0
    if half and not in_registers:  # of dK and dV
        splits = max(1, min(-(-keys // tile.keys), 200 // (rows * heads)))
        if rows * heads >= 256 and keys <= 2 * tile.keys:
            splits = 1
        elements += splits * tile.keys * sum(-(-dim // tile.queries) * tile.queries for dim in (head_dim, value_dim))
    if target.sm >= 70 or half:  # of dQ; 16 bytes of lock and counter a tile
        tiles = -(-queries // tile.queries) * -(-head_dim // tile.keys)
        elements += tiles * (tile.queries * tile.keys + 4)
    return rows * heads * -(-elements // 4) * 4 * 4


def tile_of(head_dim: int, *, half: bool, dropout: bool, target: CudaTarget) -> Tile:
    """Return the tiles of the first kernel listed that takes this head dimension and fits into shared memory."""
    has_large_memory = target.sm >= 80 and target.sm not in _SMALL_SHARED_MEMORY
    if head_dim <= 32:
        return Tile(queries=64, keys=64, widest=32)
    if head_dim <= 64:
        return Tile(queries=64, keys=64, widest=64)
    if half and head_dim <= 96 and target.sm in (86, 89) and not dropout:
        return Tile(queries=128, keys=64, widest=96)
    widest = 128 if head_dim <= 128 else None
    if target.sm < 80:
        wide = half and target.sm >= 70
        return Tile(queries=128 if wide else 64, keys=64, widest=widest)
    if half and widest and has_large_memory:
        return Tile(queries=128, keys=128, widest=128)
    return Tile(queries=128 if has_large_memory else 64, keys=64, widest=widest)


class FlashKernel(torch.autograd.Function):
    """Stand in for aten::_scaled_dot_product_flash_attention on tensors [B, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, target: CudaTarget) -> Tensor:
        q = query.transpose(1, 2)
        rows, queries, heads, head_dim = q.shape
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((rows, heads, queries), dtype=torch.float32)
        split = split_buffers(rows, heads, queries, key.shape[2], head_dim, dropout=dropout, like=q, target=target)
        rng_state = q.new_empty((2,), dtype=torch.int64)  # uint64 on the device, with and without dropout
        unused = q.new_empty((), dtype=torch.int64)
        del split
        attention = out.transpose(1, 2)
        note_attention("flash_attention", query, key, value, attention)
        ctx.save_for_backward(query, key, value, attention, log_sum_exp, rng_state, unused)
        return attention

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attention, _, _, _ = ctx.saved_tensors
        head_dim = query.shape[-1]
        grads = flash_backward(
            grad.transpose(1, 2).contiguous(),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention.transpose(1, 2).contiguous(),
            rounded_dim=round_up(head_dim, 32 if head_dim <= 128 else 64),
        )
        return (*(each.transpose(1, 2) for each in grads), None, None)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, rounded_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [B, T, H, D], k and v [B, S, K, D], as mha_bwd allocates them."""
    rows, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1], k.shape[2]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rounded = round_up(queries, 128)
    softmax_d = q.new_empty((rows, heads, rounded), dtype=torch.float32)
    dq_accum = q.new_empty((rows, rounded, heads, rounded_dim), dtype=torch.float32)
    if key_heads != heads:
        dk_expanded = q.new_empty((rows, keys, heads, head_dim))
        dv_expanded = q.new_empty((rows, keys, heads, head_dim))
        del dk_expanded, dv_expanded
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    note_attention("flash_attention_backward", *heads_first, grad, out, dq, dk, dv, dq_accum, backward=True)
    del softmax_d, dq_accum
    return dq, dk, dv


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple


def note_attention(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Tensor,
    bias: Tensor | None = None,
    backward: bool = False,
) -> None:
    """Count one call. query: [B, H, T, D]; key, value: [B, K, S, D]; others: tensors it reads and writes besides.

    A language model's attention is causal: without a bias, and with as many queries as keys, the kernel leaves out the
    scores of keys that come later.
    """
    causal = bias is None and query.shape[-2] == key.shape[-2]
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal, backward=backward)
    tensors = (query, key, value, *others) if bias is None else (query, key, value, bias, *others)
    note_kernel(operator, *tensors, flops=flops, unit="attention")


def split_buffers(
    rows: int, heads: int, queries: int, keys: int, head_dim: int, *, dropout: float, like: Tensor, target: CudaTarget
) -> tuple[Tensor, ...]:
    """Allocate partial outputs and their log-sum-exps in fp32; none where the keys are not split."""
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
    """Return the fewest splits that come within 85% of the best use of the device.

    blocks: blocks of queries, over rows and heads. slots: blocks that run at a time. key_blocks: blocks of keys, over
    which the work can be split.
    """
    if blocks >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    use = {n: (blocks * n / slots) / math.ceil(blocks * n / slots) for n in eligible}
    best = max(use.values(), default=0.0)
    return next((n for n in eligible if use[n] >= 0.85 * best), 1)
