"""What generating with a cache of R rows × C columns takes at its peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.surface import Surface


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Bytes that PyTorch has allocated in the worst case: each prompt leaves just room for the longest response.

    The cache is there from the beginning. Beside it stands one pass at a time: over prompts, as many as
    `prefill_tokens` allows, or over the next token of every row.
    """

    static_bytes: int  # whatever the shape: the weights
    cell_bytes: float  # of the cache, for each row and column
    prefill: Surface  # of a pass over prompts, (rows, tokens of the longest)
    step: Surface  # of a pass over one token of each row: N rows, T columns
    prefill_tokens: int  # of a pass over several prompts, padding included
    response_columns: int  # that a prompt leaves at least: the last token of a response is not read
    shortest_tokens: int  # of a prompt; the shorter, the more of them are in a pass
    scale: float = 1.0  # measured over predicted, of what the shape adds

    def peak_bytes(self, rows: ArrayLike, columns: int, *, cells: int = 0) -> NDArray[np.float64]:
        """Predicted for R rows × C columns. cells: of the cache, where it has more of them than R × C."""
        number = np.asarray(rows, dtype=np.int64)
        cache_bytes = self.cell_bytes * np.maximum(number * columns, cells)
        longest = max(columns - self.response_columns, 1)
        passes = np.asarray(self.step(number / columns, columns))  # a surface is asked for N / T
        for tokens in {longest, min(self.shortest_tokens, longest)}:
            passes = np.maximum(passes, self.prefill(self.prompts_of_pass(number, tokens), tokens))
        return np.asarray(self.static_bytes + self.scale * (cache_bytes + passes))

    def prompts_of_pass(self, rows: ArrayLike, tokens: int) -> NDArray[np.int64]:
        """Of prompts of this length that wait for so many rows, those that are read together."""
        return np.minimum(np.asarray(rows, dtype=np.int64), max(1, self.prefill_tokens // tokens))
