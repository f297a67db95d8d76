"""Decide how many rows a cache of a given length may have: by the memory, or by a given number.

`CacheCosts` predicts what generating with a cache of R rows × C columns takes at its peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Surface


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Give the size of a cache, and of a pass over prompts."""

    rows: int
    columns: int
    prompts: int  # that are read together; no more than rows
    prompt_tokens: int  # of each; fewer than there are columns

    def __post_init__(self) -> None:
        assert 0 < self.prompts <= self.rows, "each prompt has a slot"
        assert 0 < self.prompt_tokens <= self.columns, "each prompt has its columns"


# Of a pass over prompts, where no plan says: from about 150 to 300 tokens on, an A100 or H100 computes for as long as
# it reads 16-bit weights; where quantised weights are unpacked, it takes twice as many.
_PASS_TOKENS = 512


# Of a pass over packed prompts on a GPU. It has neither masks nor repeated keys, so that its bytes grow with its tokens
# alone, and small products are slow: with weights in 4 bits an A100 reaches 90% of its speed at about 4,000.
_PACKED_PASS_TOKENS = 4096


def usual_pass_tokens(*, is_packed: bool, is_cuda: bool) -> int:
    """Return the tokens of a pass over prompts, where no plan says."""
    return _PACKED_PASS_TOKENS if is_packed and is_cuda else _PASS_TOKENS


# Share of the bytes that rows add which stays allowed after a batch that did not fit.
_NOTCH = 0.7


class Room(Protocol):
    """Decide how many rows are generated for at once. It only becomes smaller."""

    prefill_tokens: int  # the most of a pass over prompts, padding included; a longer prompt passes alone

    def rows(self, columns: int, *, cells: int = 0) -> int:
        """Return the rows of a cache that holds so many tokens of each; at least 1.

        cells: rows × columns that have been allocated already, where that is more than such a cache has.
        """
        ...

    def shrink(self, *, rows: int, columns: int) -> None:
        """Shrink, since a cache of this shape, or a pass beside it, ran out of memory."""
        ...


class FixedRoom:
    """Allow so many rows, whatever their length; half as many after each lack of memory."""

    def __init__(self, rows: int, *, prefill_tokens: int) -> None:
        assert rows > 0, "at least one row at once"
        self._rows, self.prefill_tokens = rows, prefill_tokens

    def rows(self, columns: int, *, cells: int = 0) -> int:
        """Return the rows of such a cache."""
        return self._rows

    def shrink(self, *, rows: int, columns: int) -> None:
        """Shrink after a lack of memory."""
        self._rows = max(1, min(self._rows, rows) // 2)
        self.prefill_tokens = max(1, self.prefill_tokens // 2)


class MemoryRoom:
    """Allow as many rows as a cap in bytes does."""

    MOST_ROWS = 4096  # of a cache; steps stop getting cheaper by the row long before

    def __init__(self, costs: CacheCosts, *, cap_bytes: int, most_rows: int = MOST_ROWS) -> None:
        self._costs, self.cap_bytes, self._most_rows = costs, cap_bytes, most_rows
        self.prefill_tokens = costs.prefill_tokens
        self._known: dict[tuple[int, int], int] = {}

    def rows(self, columns: int, *, cells: int = 0) -> int:
        """Return the rows of such a cache."""
        if (columns, cells) not in self._known:
            peaks = self._costs.peak_bytes(np.arange(1, self._most_rows + 1), columns, cells=cells)
            self._known[columns, cells] = max(1, int(np.count_nonzero(peaks <= self.cap_bytes)))
        return self._known[columns, cells]

    def shrink(self, *, rows: int, columns: int) -> None:
        """Shrink after a lack of memory."""
        reached = min(float(self._costs.peak_bytes(rows, columns)), float(self.cap_bytes))
        self._known.clear()
        self.cap_bytes = int(self._costs.static_bytes + _NOTCH * (reached - self._costs.static_bytes))
        self.prefill_tokens = max(1, self.prefill_tokens // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Predict allocated bytes in the worst case: each prompt leaves just the columns of the longest response.

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
    is_packed: bool = False  # prompts of any lengths fill a pass, without padding

    def peak_bytes(self, rows: ArrayLike, columns: int, *, cells: int = 0) -> NDArray[np.float64]:
        """Predict for R rows × C columns. cells: of the cache, where it has more of them than R × C."""
        number = np.asarray(rows, dtype=np.int64)
        cache_bytes = self.cell_bytes * np.maximum(number * columns, cells)
        longest = max(columns - self.response_columns, 1)
        passes = np.asarray(self.step(number / columns, columns))  # a surface is asked for N / T
        for tokens in {longest, min(self.shortest_tokens, longest)}:
            passes = np.maximum(passes, self.prefill(self.prompts_of_pass(number, tokens), tokens))
        return np.asarray(self.static_bytes + self.scale * (cache_bytes + passes))

    def prompts_of_pass(self, rows: ArrayLike, tokens: int) -> NDArray[np.int64]:
        """Count the prompts of this length that are read together when so many rows are free.

        Of packed ones as many as the pass has tokens for at most, since shorter ones may fill what they leave.
        """
        together = -(-self.prefill_tokens // tokens) if self.is_packed else self.prefill_tokens // tokens
        return np.minimum(np.asarray(rows, dtype=np.int64), max(1, together))

    def with_passes_of(self, tokens: int, *, longest: int) -> CacheCosts:
        """Return the costs with so many tokens in a pass; of packed prompts whole ones of the `longest`, in tokens."""
        tokens = max(tokens // longest, 1) * longest if self.is_packed else tokens
        return replace(self, prefill_tokens=tokens)
