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
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast
from weakref import proxy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from brim.models import Precision
from brim.models.loss import base_model
from brim.models.packing import CachedRows, PackedAttention, PackedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Passes:
    """Run a model over a cache of rows × columns.

    cells: memory of the cache, where it is more than rows × columns. packed: prompts are read as one sequence without
    padding, and no pass has a mask; None: they are padded.
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
        packed: PackedAttention | None = None,
    ) -> None:
        self._model, self._pad_id, self._packed = model, pad_id, packed
        self._device, self._precision = device, precision
        self.cache = RowCache(num_cache_layers(model), rows=rows, columns=columns, cells=cells)
        accepted = inspect.signature(base_model(model).forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_what_to_keep = "logits_to_keep" in accepted

    @property
    def is_packed(self) -> bool:
        """Return whether prompts are read without padding."""
        return self._packed is not None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into the next slots; return logits [k, V] of what follows each."""
        return self._prefill_padded(prompts) if self._packed is None else self._prefill_packed(prompts, self._packed)

    def _prefill_padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = np.full((len(prompts), longest), self._pad_id, dtype=np.int64)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = prompt
        flat, first = moved(ids.ravel(), longest - np.array(lengths), device=self._device)
        columns = torch.arange(longest, device=self._device)
        self.cache.begin_prefill(lengths)
        logits = self._run(
            flat.view(ids.shape),
            mask=(columns >= first[:, None]).long(),
            positions=(columns - first[:, None]).clamp(min=0),
        )
        self.cache.end_prefill(lengths)
        return logits

    def _prefill_packed(self, prompts: Sequence[Sequence[int]], packed: PackedAttention) -> Tensor:
        cache, lengths = self.cache, [len(prompt) for prompt in prompts]
        of_each = np.concatenate([np.arange(length) for length in lengths])
        ids, positions, slots, columns, bounds = moved(
            np.concatenate(prompts),
            of_each,
            cache.num_rows + np.repeat(np.arange(len(prompts)), lengths),
            cache.end - np.repeat(lengths, lengths) + of_each,
            np.cumsum([0, *lengths]),
            device=self._device,
        )
        rows = PackedRows(
            position_ids=positions[None], bounds=bounds.int(), lengths=tuple(lengths), num_rows=len(prompts)
        )
        cache.begin_prefill(lengths, places=(slots, columns))
        with packed.of(rows):
            logits = self._run(ids[None], mask=None, positions=rows.position_ids, kept=bounds[1:] - 1)
        cache.end_prefill(lengths)
        return logits

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Give every row its next token; return logits [n, V] of what follows it."""
        cache = self.cache
        assert len(tokens) == cache.num_rows, "a token for each row"
        each, before = moved(np.array(tokens), cache.end - np.array(cache.starts), device=self._device)
        ids, positions, mask = each[:, None], before[:, None], None
        with ExitStack() as stack:
            if self._packed is None:
                distance = torch.arange(cache.window, -1, -1, device=self._device)
                mask = (distance <= positions).long()
            else:
                is_full = max(cache.starts) == cache.base
                rows = CachedRows(positions=positions, num_columns=cache.window + 1, is_full=is_full)
                stack.enter_context(self._packed.of(rows))
            stack.enter_context(attending_in_windows(cache.starts, self._device))
            logits = self._run(ids, mask=mask, positions=positions)
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

    def _run(self, ids: Tensor, *, mask: Tensor | None, positions: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return logits at the places `kept` of a sequence [1, N], or at the last place of each row."""
        given: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if self._takes_what_to_keep:
            given["logits_to_keep"] = 1 if kept is None else kept
        with torch.no_grad(), self._precision.autocast(self._device, keeps_copies=False):
            output = self._model(
                input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **given
            )
        logits: Tensor = output.logits
        if self._takes_what_to_keep:
            return logits[:, -1] if kept is None else logits[0]
        return logits[:, -1].clone() if kept is None else logits[0, kept]  # a view would keep those of all positions


def moved(*arrays: NDArray[Any], device: torch.device) -> tuple[Tensor, ...]:
    """Bring arrays of one dtype to the device in one copy; a GPU makes it while the CPU goes on."""
    joined, is_cuda = torch.from_numpy(np.concatenate(arrays)), device.type == "cuda"
    joined = (joined.pin_memory() if is_cuda else joined).to(device, non_blocking=is_cuda)
    return torch.split(joined, [len(each) for each in arrays])


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
        # While prompts are read: where their keys and values go, [slots, :, columns], in this order.
        self.places: tuple[Any, Any] | None = None
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

    def begin_prefill(self, lengths: Sequence[int], *, places: tuple[Tensor, Tensor] | None = None) -> None:
        """Prepare for a pass over prompts of these lengths, left-padded to the longest, into the next slots.

        places: of a pass over them as one sequence of N tokens: the slot and the column of each, [N] int64.
        """
        assert max(lengths) <= self.end <= self.columns, "prompts end at the column that is written next"
        assert self.num_rows + len(lengths) <= self.rows, "each row has a slot"
        slots = slice(self.num_rows, self.num_rows + len(lengths))
        self.places = places or (slots, slice(self.end - max(lengths), self.end))

    def end_prefill(self, lengths: Sequence[int]) -> None:
        """Take the rows in."""
        self.places = None
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
        if cache.places is not None:
            for kept, states in ((keys, key_states), (values, value_states)):
                if isinstance(cache.places[0], Tensor):  # one sequence: a slot and a column for each token
                    kept.transpose(1, 2)[cache.places] = states[0].transpose(0, 1)
                else:
                    kept[cache.places[0], :, cache.places[1]] = states
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
        return 0 if self._cache.places is not None else self._cache.window

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
