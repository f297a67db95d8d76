"""The two passes of generation over a RowCache: prompts are read, and every row writes a token.

Legend: k prompts of a pass, P tokens of the longest, n rows that are in, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from brim.infer.row_cache import RowCache
from brim.infer.row_windows import attending_in_windows
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Passes:
    """A model with a cache of rows × columns.

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
        accepted = _accepted(model)
        self._takes_positions = "position_ids" in accepted
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._starts: Tensor | None = None  # of the rows that are in, on the device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into the next slots; logits [k, V] of what follows each."""
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
        """Every row takes its next token; logits [n, V] of what follows it."""
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
        """The only row that is in takes several tokens; logits [1, V] of what follows them."""
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
        """As if the tokens up to this column had been written, or none behind it."""
        self.cache.end = end

    def remove(self, slot: int) -> None:
        """See RowCache."""
        self.cache.remove(slot)
        self._starts = None

    def lay_out(self, *, columns: int, end: int) -> None:
        """See RowCache."""
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
    """Layers that may keep keys and values."""
    return int(base_model(model).config.get_text_config(decoder=True).num_hidden_layers)


def base_model(model: Any) -> Any:
    """The architecture itself, also inside PEFT's wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model else model


def _accepted(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(base_model(model).forward).parameters)
