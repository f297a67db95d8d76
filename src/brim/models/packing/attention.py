"""Run rows of tokens through a model as one sequence, without padding, each row attending to itself alone.

transformers hands the attention of most architectures to a function of its registry. One of brim's own stands there
while packed rows pass: it takes the rows' places from the model's configuration, makes no mask, and reads no values. On
CUDA it is PyTorch's attention for sequences of several lengths, elsewhere one call of the usual attention for each row.
While responses are written, each row's next token attends to what a cache keeps of its row.

Legend: R rows, N tokens of all rows, H query heads, K key and value heads, D head dimension, W columns of a cache.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_NAME = "brim_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Say where the rows of one sequence lie. What fills it up lies there as one more row, the last."""

    position_ids: Tensor  # [1, N] int64, from 0 in each row: the model is given them beside the tokens
    bounds: Tensor  # [R + 1] int32: where each row begins, and the end
    lengths: tuple[int, ...]  # tokens of each row
    num_rows: int  # without what fills the sequence up


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """Say which columns of a cache each row's next token attends to: the last ones, as many as its row has tokens."""

    positions: Tensor  # [R, 1] int64: of the next token in its row
    num_columns: int  # W, of which the last is the next token's own
    is_full: bool  # every row has a token in each column
    _masks: dict[int, Tensor] = field(default_factory=dict)  # by how many columns are seen; each serves many layers

    def mask(self, sliding_window: int | None) -> Tensor | None:
        """Return which columns each row sees, [R, 1, 1, W]; None: all. No values are read."""
        width = min(sliding_window or self.num_columns, self.num_columns)
        if self.is_full and width == self.num_columns:
            return None
        if width not in self._masks:
            distance = torch.arange(self.num_columns - 1, -1, -1, device=self.positions.device)
            self._masks[width] = ((distance <= self.positions) & (distance < width))[:, None, None]
        return self._masks[width]


class Unpackable(Exception):
    """Tell that an architecture's attention asks for what packed rows cannot be given."""


class PackedAttention:
    """Switch a model between its own attention and that of packed rows."""

    def __init__(self, model: nn.Module, *, is_cuda: bool = False) -> None:
        """Look for the model's configurations. is_cuda: it runs on a GPU, or is traced as on one."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if _NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_ATTENTION_FUNCTIONS.register(_NAME, packed_attention)
        configs = (getattr(module, "config", None) for module in model.modules())
        self.is_cuda = is_cuda
        self.widths: set[tuple[int, int]] = set()  # of the queries and values of the heads that have passed
        self._configs = list({id(each): each for each in configs if hasattr(each, _KEY)}.values())

    @contextmanager
    def of(self, rows: PackedRows | CachedRows) -> Iterator[None]:
        """Let these rows pass, forward and backward: recomputed activations want the same attention."""
        before = [getattr(config, _KEY) for config in self._configs]
        for config in self._configs:
            setattr(config, _KEY, _NAME)
            setattr(config, _ROWS, (rows, self))
        try:
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                setattr(config, _KEY, value)
                delattr(config, _ROWS)


def passing(attention: PackedAttention | None, rows: PackedRows | None) -> AbstractContextManager[None]:
    """Return the context in which rows pass forward and backward. rows: None of padded ones."""
    return _padded_rows() if attention is None or rows is None else attention.of(rows)


@cache
def _padded_rows() -> _PaddedRows:
    from transformers import masking_utils

    return _PaddedRows(masking_utils)


class _PaddedRows:
    """Keep transformers from looking at the positions of padded rows to see whether they are packed.

    It would wait for the device in each pass, to find what is known. In a trace, which has no values, it would make a
    mask to be safe. Threads' passes end in any order.
    """

    def __init__(self, masks: Any) -> None:
        self._masks, self._lock = masks, threading.Lock()
        self._num_passes, self._look = 0, masks.find_packed_sequence_indices

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_passes:
                self._look = self._masks.find_packed_sequence_indices
                self._masks.find_packed_sequence_indices = _not_packed
            self._num_passes += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_passes -= 1
            if not self._num_passes:
                self._masks.find_packed_sequence_indices = self._look


def _not_packed(position_ids: Tensor) -> None:
    """Answer as transformers does of positions that begin once."""


_KEY = "_attn_implementation_internal"  # the public property would go through all sub-configurations, at each pass
_ROWS = "_brim_packed_rows"  # the configuration reaches every attention, keywords do not; nor does a thread's context


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each row: query [1, H, N, D], key and value [1, K, N, D]. Return [1, N, H, D] and no weights.

    Of cached rows: query [R, H, 1, D], key and value [R, K, W, D]; returns [R, 1, H, D].
    Raises Unpackable for what changes the scores in a way that is not known here.
    """
    asked = sorted(name for name in ("softcap", "s_aux", "position_bias", "cache") if others.get(name) is not None)
    rows, attention = getattr(module.config, _ROWS)
    is_cached, options = isinstance(rows, CachedRows), {"dropout": dropout, "scaling": scaling}
    if asked or attention_mask is not None or not (is_cached or query.shape[2] == key.shape[2]):
        raise Unpackable(f"its attention asks for {' and '.join(asked)}" if asked else "it makes masks of its own")
    if is_cached:
        return _over_cache(module, query, key, value, rows.mask(sliding_window), **options), None
    attention.widths.add((query.shape[-1], value.shape[-1]))
    if attention.is_cuda and _fits_kernel(query, value, dropout=dropout):
        return _by_kernel(query, key, value, rows, scaling, sliding_window), None
    return _row_by_row(module, query, key, value, rows, sliding_window, **options), None


def _over_cache(module: nn.Module, *given: Tensor | None, **options: Any) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]  # where an engine may have put one that attends in parts
    return cast(Tensor, attend(module, *given, is_causal=False, **options)[0])


def _row_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    sliding_window: int | None,
    **options: Any,
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    split = (torch.split(each, list(rows.lengths), dim=2) for each in (query, key, value))
    attended = []
    for length, *tensors in zip(rows.lengths, *split, strict=True):
        is_within = sliding_window is None or length <= sliding_window
        mask = None if is_within else _window(length, sliding_window or 0, query.device)
        attended.append(sdpa_attention_forward(module, *tensors, mask, is_causal=True, **options)[0])
    return torch.cat(attended, dim=1)


def _window(length: int, width: int, device: torch.device) -> Tensor:
    """Return which keys each query sees, [1, 1, T, T]: itself and the width - 1 before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return ((distance >= 0) & (distance < width))[None, None]


WIDEST_HEAD = 256


def _fits_kernel(query: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Return whether PyTorch's attention for rows of several lengths takes these tensors: 16 bits, without dropout."""
    width = query.shape[-1]
    return _dtype(query) in _HALF and not dropout and width == value.shape[-1] <= WIDEST_HEAD


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which autocast, which does not know the kernel, would run it."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return query.dtype


_HALF = (torch.float16, torch.bfloat16)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention import varlen

    dtype = _dtype(query)
    q, k, v = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))  # [N, heads, D]
    longest = max(rows.lengths)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # a tuple: it is compared with one
    options: dict[str, Any] = {
        "window_size": window,
        "scale": scaling,
        "enable_gqa": q.shape[1] != k.shape[1],
        "is_causal": True,
    }
    taken = _keywords_of(varlen.varlen_attn)
    options = {name: value for name, value in options.items() if name in taken}
    out: Any = varlen.varlen_attn(q, k, v, rows.bounds, rows.bounds, longest, longest, **options)
    return cast(Tensor, out[None])


@cache
def _keywords_of(function: Any) -> frozenset[str]:
    """Return what it takes: torch 2.10 knows is_causal, 2.11 window_size in its place, 2.12 enable_gqa besides."""
    return frozenset(inspect.signature(function).parameters)


@cache
def has_kernel() -> bool:
    """Return whether PyTorch's attention for rows of several lengths takes a scale and a window, as from 2.11 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size"} <= _keywords_of(varlen_attn)


def packed_rows(lengths: Sequence[int], *, filling: int = 0) -> PackedRows:
    """Return the places of rows of these lengths, as tensors of the CPU. filling: tokens behind them, of no row."""
    each = [*lengths, filling] if filling else list(lengths)
    bounds = np.cumsum([0, *each])
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], each)
    return PackedRows(
        position_ids=torch.from_numpy(positions[None]),
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        lengths=tuple(each),
        num_rows=len(lengths),
    )
