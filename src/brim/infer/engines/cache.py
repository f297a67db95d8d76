"""Keep keys and values of rows that come and go, and run the two passes of generation over them.

The passes (`Passes`): prompts are read, and every row writes a token. The memory of a `RowCache` is allocated once.

All rows share one timeline of columns: whatever is written next goes to the same column of every row, and a prompt is
put where it ends at that column. So a step of all rows writes one column and reads one block, however long each of
them is; what stands before a row's first token is masked. The rows that are in are the first ones: one that leaves is
replaced by the last. Only when the columns are used up, or rows should become more and shorter, is the memory laid
out again, in place.

All rows share one window of columns, from the first token of the longest row on; what a shorter row lacks is masked,
and read all the same. On a CPU a step mostly reads keys and values, so attention in parts, in which each few rows
look only at the columns that they need, makes more calls over less memory and is faster: with prompts of long-tailed
lengths, by up to a quarter of the whole time (benchmarks/inference.py).

Legend: k prompts of a pass, P tokens of the longest, V vocabulary; R rows and C columns of the layout, n rows that
are in, H heads, W columns of the window, D size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from brim.models import Precision
from brim.models.loss import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Passes:
    """Run a model over a cache of rows × columns.

    cells: memory of the cache, where it is more than rows × columns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        columns: int,
        cells: int | None = None,
        pad_id: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._model, self._pad_id = model, pad_id
        self._device, self._precision = device, precision
        self.cache = RowCache(num_cache_layers(model), rows=rows, columns=columns, cells=cells)
        accepted = inspect.signature(base_model(model).forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._starts: Tensor | None = None  # of the rows that are in, on the device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into the next slots; return logits [k, V] of what follows each."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = np.full((len(prompts), longest), self._pad_id, dtype=np.int64)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = prompt
        columns = torch.arange(longest, device=self._device)
        first = torch.tensor([longest - length for length in lengths]).to(self._device)[:, None]
        self.cache.begin_prefill(lengths)
        logits = self._run(
            torch.from_numpy(ids).to(self._device),
            mask=(columns >= first).long(),
            positions=(columns - first).clamp(min=0),
        )
        self.cache.end_prefill(lengths)
        self._starts = None
        return logits

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Give every row its next token; return logits [n, V] of what follows it."""
        cache = self.cache
        assert len(tokens) == cache.num_rows, "a token for each row"
        if self._starts is None:
            self._starts = torch.tensor(cache.starts).to(self._device)[:, None]
        columns = torch.arange(cache.base, cache.end + 1, device=self._device)
        with attending_in_windows(cache.starts, self._device):
            logits = self._run(
                torch.tensor(tokens).to(self._device)[:, None],
                mask=(columns >= self._starts).long(),
                positions=cache.end - self._starts,
            )
        cache.end_step()
        return logits

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Give the only row several tokens; return logits [1, V] of what follows them."""
        cache, (start,) = self.cache, self.cache.starts
        end = cache.end + len(tokens)
        assert end <= cache.columns, "each token has a column"
        logits = self._run(
            torch.tensor([list(tokens)]).to(self._device),
            mask=torch.ones((1, end - start), dtype=torch.int64, device=self._device),
            positions=torch.arange(cache.end - start, end - start, device=self._device)[None],
        )
        cache.end_step(len(tokens))
        return logits

    def skip_to(self, end: int) -> None:
        """Go on as if the tokens up to this column, and none behind it, had been written."""
        self.cache.end = end

    def remove(self, slot: int) -> None:
        """Take a row out; the last one moves into its slot."""
        self.cache.remove(slot)
        self._starts = None

    def lay_out(self, *, columns: int, end: int) -> None:
        """Move what is in use (`RowCache.lay_out`)."""
        self.cache.lay_out(columns=columns, end=end)
        self._starts = None

    def _run(self, ids: Tensor, *, mask: Tensor, positions: Tensor) -> Tensor:
        place = {"position_ids": positions} if self._takes_positions else {}
        with torch.no_grad(), self._precision.autocast(self._device, keeps_copies=False):
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                **place,
                **self._last_only,
            )
        logits: Tensor = output.logits[:, -1]
        return logits if self._last_only else logits.clone()  # a view would keep those of all positions


def num_cache_layers(model: PreTrainedModel) -> int:
    """Count the layers that may keep keys and values."""
    return int(base_model(model).config.get_text_config(decoder=True).num_hidden_layers)


class RowCache(Cache):  # type: ignore[misc]
    """Keep keys and values of rows; a model of transformers takes it as `past_key_values`.

    cells: rows × columns that there is memory for. num_layers: of the model that keep keys and values.
    """

    def __init__(self, num_layers: int, *, rows: int, columns: int, cells: int | None = None) -> None:
        self.cells = rows * columns if cells is None else cells
        self.columns = columns
        self.starts: list[int] = []  # the column of each row's first token
        self.end = 0  # the column that is written next
        self.prefilled: tuple[int, int] | None = None  # slots from, to, while their prompts are read
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    @property
    def rows(self) -> int:
        """Return R, the rows that there is memory for."""
        return self.cells // self.columns

    @property
    def num_rows(self) -> int:
        """Return n, the rows that are in."""
        return len(self.starts)

    @property
    def base(self) -> int:
        """Return the first column that any row needs."""
        return min(self.starts, default=self.end)

    @property
    def window(self) -> int:
        """Return the number of columns in use."""
        return self.end - self.base

    def remove(self, slot: int) -> None:
        """Take a row out; the last one moves into its slot."""
        last = self.num_rows - 1
        if slot != last:
            columns = slice(self.starts[last], self.end)
            for layer in self._filled():
                layer.copy_row(last, slot, columns)
            self.starts[slot] = self.starts[last]
        self.starts.pop()

    def lay_out(self, *, columns: int, end: int) -> None:
        """Move what is in use, so that there are `columns` columns and the next to be written is `end`.

        The window and the rows that are in must fit.
        """
        base, window = self.base, self.window
        assert window <= end <= columns, "the rows that are in keep their columns"
        assert self.num_rows * columns <= self.cells, "no rows are lost"
        for layer in self._filled():
            layer.lay_out(self.columns, columns, num_rows=self.num_rows, source=base, target=end - window, width=window)
        self.columns = columns
        self.starts = [start - base + end - window for start in self.starts]
        self.end = end

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Prepare for a pass over prompts of these lengths, left-padded to the longest, into the next slots."""
        assert max(lengths) <= self.end <= self.columns, "prompts end at the column that is written next"
        assert self.num_rows + len(lengths) <= self.rows, "each row has a slot"
        self.prefilled = (self.num_rows, self.num_rows + len(lengths))

    def end_prefill(self, lengths: Sequence[int]) -> None:
        """Take the rows in."""
        self.prefilled = None
        self.starts += [self.end - length for length in lengths]

    def end_step(self, num_tokens: int = 1) -> None:
        """Count the tokens that every row has written."""
        self.end += num_tokens

    def touch(self) -> None:
        """Write to all of its memory: what has never been written to is not resident on a CPU."""
        for layer in self._filled():
            layer.touch()

    def _filled(self) -> list[_RowLayer]:
        return [layer for layer in self.layers if layer.is_initialized]


_NOTHING = torch.empty(0)


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keep keys and values of one layer."""

    is_sliding = False  # windows are masked, not forgotten
    is_compileable = False
    is_croppable = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        # Else the two would hold each other, and the memory, until Python collects cycles: long after the last row.
        self._cache = cast("RowCache", proxy(cache))
        self._keys = self._values = _NOTHING
        self._key_shape = self._value_shape = (0, 0)  # H, D

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate, once it is known what a token's keys and values look like."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_shape = key_states.shape[1], key_states.shape[3]
        self._value_shape = value_states.shape[1], value_states.shape[3]
        # Zeros: what is masked is multiplied by zero, which does not make a NaN harmless.
        self._keys = key_states.new_zeros(self._cache.cells * self._key_shape[0] * self._key_shape[1])
        self._values = value_states.new_zeros(self._cache.cells * self._value_shape[0] * self._value_shape[1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep [n, H, T, D]; return what the pass attends to: the prompts themselves, or the window with it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        keys, values = self._laid_out(cache.columns)
        if cache.prefilled is not None:
            slots = slice(*cache.prefilled)
            columns = slice(cache.end - key_states.shape[2], cache.end)
            keys[slots, :, columns] = key_states
            values[slots, :, columns] = value_states
            return key_states, value_states
        num_rows, end = key_states.shape[0], cache.end + key_states.shape[2]
        keys[:num_rows, :, cache.end : end] = key_states
        values[:num_rows, :, cache.end : end] = value_states
        seen = slice(cache.base, end)
        return keys[:num_rows, :, seen], values[:num_rows, :, seen]

    def touch(self) -> None:
        self._keys.zero_()
        self._values.zero_()

    def copy_row(self, source: int, target: int, columns: slice) -> None:
        for laid_out in self._laid_out(self._cache.columns):
            laid_out[target, :, columns] = laid_out[source, :, columns]

    def lay_out(self, before: int, after: int, *, num_rows: int, source: int, target: int, width: int) -> None:
        """Move row by row, in the direction in which none is written over before it has been read."""
        slots = range(num_rows) if after <= before else reversed(range(num_rows))
        old, new = self._laid_out(before), self._laid_out(after)
        for slot in slots:
            for was, becomes in zip(old, new, strict=True):
                row = was[slot, :, source : source + width].clone()
                becomes[slot, :, target : target + width] = row

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how far the mask reaches. query_length: before transformers 5.10, the positions of the queries."""
        num_queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + num_queries, 0

    def get_seq_length(self) -> int:
        """Return the columns before those of the pass, as a mask sees them."""
        return 0 if self._cache.prefilled is not None else self._cache.window

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def _laid_out(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, [R, H, C, D] each."""
        rows = self._cache.cells // columns
        return _view(self._keys, rows, columns, self._key_shape), _view(self._values, rows, columns, self._value_shape)


def _view(flat: Tensor, rows: int, columns: int, shape: tuple[int, int]) -> Tensor:
    heads, size = shape
    return flat[: rows * heads * columns * size].view(rows, heads, columns, size)


_ROWS = 8  # looked at together: of 8, 16, 32 and 64 the fastest in one short, noisy trial; 16 is about as good


def row_windows(starts: Sequence[int]) -> list[tuple[slice, int]]:
    """Return neighbouring slots, in order, and how many columns of the common window none of them needs.

    starts: the column of each slot's first token.
    """
    base = min(starts)
    firsts = range(0, len(starts), _ROWS)
    parts = [slice(first, min(first + _ROWS, len(starts))) for first in firsts]
    return [(part, min(starts[part]) - base) for part in parts]


@contextmanager
def attending_in_windows(starts: Sequence[int], device: torch.device) -> Iterator[None]:
    """Let models whose attention is transformers' `sdpa` attend in parts while the context lasts.

    On a GPU nothing changes: there, reading is fast and each call has its price.
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


_WINDOWS: ContextVar[Sequence[tuple[slice, int]]] = ContextVar("row windows", default=())


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Attend. query: [n, H, 1, D]. key, value: [n, their heads, W, D]. attention_mask: [n, 1, 1, W], or None."""
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
    if not windows or windows[-1][0].stop != query.shape[0] or query.shape[2] != 1 or has_own_columns:
        return part(slice(None), 0), None
    return torch.cat([part(*window) for window in windows]), None
