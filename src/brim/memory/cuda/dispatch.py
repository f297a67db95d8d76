"""Trace a model on fake CPU tensors as if it ran on CUDA, with the flash-attn package where it is asked for.

While a step is traced, operators that CUDA runs by other kernels are replaced by stand-ins. transformers is patched
where its code asks the device, or looks at values that a trace does not have.

The package's functions follow flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of
Dao-AILab/flash-attention, release 2.8.3; since 2.6.2 the log-sum-exp of rows of different lengths is kept without
padding (pull request 970). Legend: B rows, H query heads, K key and value heads, T queries, S keys, N tokens of all
rows, D head dimension. Values are not computed: shapes, dtypes, layouts and lifetimes are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.functional import pad

from brim.memory.cuda.attention import (
    CudaTarget,
    flash_backward,
    note_attention,
    record_answers,
    round_up,
    split_buffers,
)
from brim.memory.cuda.autocast import AccumulationInPlace, autocast_as_on_cuda
from brim.memory.cuda.operators import grouped_mm, rms_norm
from brim.memory.cuda.sdpa import sdpa
from brim.models.packing import passing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def as_on_cuda(
    model: PreTrainedModel, target: CudaTarget, *, flash_attention: FlashAttnPackage | None = None
) -> Iterator[None]:
    """Run the model's forward and backward pass within this context; the optimizer within `foreach_as_on_cuda`.

    Enter it after the mode that records (see AccumulationInPlace).

    flash_attention: run attention with the flash-attn package, as `attn_implementation: flash_attention_2` does; build
    the model with another implementation.
    """
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations import moe

    with cuda_kernels(target), autocast_as_on_cuda(), passing(None, None), ExitStack() as stack:
        # The original asks for the device's capability, or for addresses of CPU tensors.
        if "_can_use_grouped_mm" in vars(moe):
            stack.enter_context(patch.object(moe, "_can_use_grouped_mm", lambda *tensors: _is_grouped(target)))
        # The original reads the positions' values to see whether rows are packed.
        stack.enter_context(patch.object(flash, "_is_packed_sequence", lambda position_ids, batch_size: False))
        if flash_attention is not None:
            stack.enter_context(_flash_attention(model, flash_attention))
        stack.enter_context(AccumulationInPlace())
        yield


# Our FlashAttention among transformers' attention functions; "flash" in the name tells its code what it is.
_NAME = "brim/flash-attention-2"


@record_answers
def _is_grouped(target: CudaTarget) -> bool:
    """Return whether the products of all experts are traced as one grouped product.

    Older GPUs run a fallback. Before transformers 5.17 its gradient reads values, which a trace does not have; what it
    allocates is what the grouped product does, which is traced in its place.
    """
    from transformers.integrations import moe

    return target.sm >= 80 or "_grouped_mm_fallback_backward_fake" not in vars(moe)


@contextmanager
def _flash_attention(model: PreTrainedModel, package: FlashAttnPackage) -> Iterator[None]:
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations import hub_kernels
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, flash_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, flash_attention_mask)
    with ExitStack() as stack:
        stack.enter_context(patch.object(flash, "_loaded_implementation", None))
        stack.enter_context(patch.object(hub_kernels, "load_and_register_attn_kernel", lambda *args, **kwargs: package))
        stack.enter_context(patch.object(flash, "_upad_input", unpad_input))
        model.config._attn_implementation = _NAME
        try:
            yield
        finally:
            model.config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS._global_mapping[_NAME]
            del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[_NAME]


def flash_attention_mask(*, attention_mask: Tensor | None = None, kv_length: int, **arguments: Any) -> Tensor | None:
    """Return the mask of tokens [B, S]; a mask is taken to hide something, since a trace has no values."""
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def unpad_input(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, query_length: int, unpad: object
) -> tuple[Any, ...]:
    """Return the tokens that the mask keeps, one row after the other: all of them, the worst case.

    After `_upad_input` of transformers' modeling_flash_attention_utils. query: [B, T, H, D]; key, value: [B, S, K, D].
    """
    rows, keys = key.shape[0], key.shape[1]
    counts = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.new_empty((rows * keys,), dtype=torch.int64)
    cu_keys = pad(torch.cumsum(counts, dim=0, dtype=torch.int32), (1, 0))
    key, value = (each.reshape(rows * keys, *each.shape[2:])[indices] for each in (key, value))
    if query_length == 1:
        cu_queries = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        return query.squeeze(1), key, value, cu_queries[:-1], (cu_queries, cu_keys), (1, keys)
    flat = query.reshape(rows * query_length, *query.shape[2:])
    if query_length == keys:
        return flat[indices], key, value, indices, (cu_keys, cu_keys), (keys, keys)
    kept = attention_mask.new_empty((rows * query_length,), dtype=torch.int64)
    return flat[kept], key, value, kept, (cu_keys, cu_keys), (query_length, keys)


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *others: object, **options: object) -> Tensor:
    """Stand in for PyTorch's attention of packed rows, which runs FlashAttention."""
    return _apply(_Varlen, q, k, v, bounds)


_dropout = functional.dropout


_softmax = functional.softmax


@contextmanager
def cuda_kernels(target: CudaTarget) -> Iterator[None]:
    """Trace both passes within this context: activation checkpointing runs the forward pass in the backward pass.

    The functions are replaced in PyTorch's modules, for all threads. A TorchFunctionMode would be off while
    Tensor.backward runs, and so in what checkpointing recomputes.
    """
    attention: Any = partial(sdpa, target)
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (functional, "scaled_dot_product_attention", attention),
            (functional, "dropout", dropout),
            (functional, "softmax", softmax),
            (functional, "rms_norm", rms_norm),
            (functional, "grouped_mm", grouped_mm),
            (varlen, "varlen_attn", varlen_attn),
            (torch, "dropout", lambda input, p, train: dropout(input, p, train)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run native_dropout, whose mask is boolean, as CUDA does where something, but not all, is dropped.

    After is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp.
    """
    if training and 0 < p < 1 and not inplace and input.numel() > 0:
        return torch.native_dropout(input, p, True)[0]
    return _dropout(input, p, training, inplace)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Compute an fp32 softmax of fp16 scores in one kernel, without an fp32 copy, as CUDA does; bf16 ones are copied.

    After softmax in aten/src/ATen/native/SoftMax.cpp.
    """
    if dim is not None and dtype == torch.float32 and input.dtype == torch.float16:
        return torch._softmax(input, dim, True)
    return _softmax(input, dim, _stacklevel, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnPackage:
    """Provide the functions that transformers takes from the package."""

    target: CudaTarget

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Return the attention of q [B, T, H, D] over k and v [B, S, K, D]."""
        return _apply(_Fixed, q, k, v, dropout_p, self.target)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of q [N, H, D] over k and v [N, K, D], rows one after the other."""
        return _apply(_Varlen, q, k, v, cu_seqlens_q)

    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse attention over a paged cache, which brim does not use."""
        raise NotImplementedError


def _apply(function: type[torch.autograd.Function], q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    """Run the function on tensors whose last dimension has stride 1, which are copied where it has not."""
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    out: Tensor = function.apply(q, k, v, *rest)  # type: ignore[no-untyped-call]
    return out


class _Fixed(torch.autograd.Function):
    """Stand in for FlashAttnFunc."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float, target: CudaTarget) -> Tensor:
        q, k, v, width = _padded(q, k, v)
        rows, queries, heads, head_dim = q.shape
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((rows, heads, queries), dtype=torch.float32)
        split = split_buffers(rows, heads, queries, k.shape[1], head_dim, dropout=dropout, like=q, target=target)
        rng_state = q.new_empty((2,), dtype=torch.int64)
        del split
        note_attention("flash_attention", *(each.transpose(1, 2) for each in (q, k, v)), out)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, rng_state)
        return out[..., :width] if width != head_dim else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, _, _ = ctx.saved_tensors
        width, head_dim = grad.shape[-1], q.shape[-1]
        grad = _widened(grad, head_dim)
        grads = flash_backward(grad, q, k, v, out, rounded_dim=_rounded(head_dim))
        return (*(each[..., :width] if width != head_dim else each for each in grads), None, None)


class _Varlen(torch.autograd.Function):
    """Stand in for FlashAttnVarlenFunc."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v, width = _padded(q, k, v)
        tokens, heads, head_dim = q.shape
        rows = cu_seqlens.shape[0] - 1
        out = torch.empty_like(q)
        log_sum_exp = q.new_empty((heads, tokens), dtype=torch.float32)
        rng_state = q.new_empty((2,), dtype=torch.int64)
        note_attention("flash_attention", *_by_row(rows, q, k, v), out)
        ctx.save_for_backward(q, k, v, out, log_sum_exp, cu_seqlens, rng_state)
        ctx.rows = rows
        return out[..., :width] if width != head_dim else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, _, _ = ctx.saved_tensors
        width, head_dim = grad.shape[-1], q.shape[-1]
        grad = _widened(grad, head_dim)
        tokens, heads, _ = q.shape
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        spaced = tokens + 128 * ctx.rows  # rows stand at least a block of 128 queries apart
        softmax_d = q.new_empty((heads, spaced), dtype=torch.float32)
        dq_accum = q.new_empty((spaced, heads, _rounded(head_dim)), dtype=torch.float32)
        if k.shape[1] != heads:
            dk_expanded = q.new_empty((k.shape[0], heads, head_dim))
            dv_expanded = q.new_empty((k.shape[0], heads, head_dim))
            del dk_expanded, dv_expanded
        by_row = _by_row(ctx.rows, q, k, v)
        note_attention("flash_attention_backward", *by_row, grad, dq, dk, dv, dq_accum, backward=True)
        del softmax_d, dq_accum
        grads = (dq, dk, dv)
        return (*(each[..., :width] if width != head_dim else each for each in grads), None)


def _by_row(rows: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield each tensor [N, H, D] as [B, H, T, D] as far as its shape goes, as if all rows were of equal length."""
    for tensor in tensors:
        tokens, heads, width = tensor.shape
        yield tensor[: tokens // rows * rows].view(rows, tokens // rows, heads, width).transpose(1, 2)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pad head dimensions to a multiple of 8; return the tensors and the width before."""
    width = q.shape[-1]
    if width % 8:
        q, k, v = (pad(each, (0, 8 - width % 8)) for each in (q, k, v))
    return q, k, v, width


def _widened(grad: Tensor, head_dim: int) -> Tensor:
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return pad(grad, (0, head_dim - grad.shape[-1])) if grad.shape[-1] != head_dim else grad


def _rounded(head_dim: int) -> int:
    """Return the width of an accumulated row."""
    return round_up(head_dim, 32) if head_dim <= 192 else 256
