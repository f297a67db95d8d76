"""How many rows a cache of a given length may have: by the memory, or by a number that somebody gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from brim.batching.surface import Surface

MOST_ROWS = 4096  # of a cache; steps stop getting cheaper by the row long before
# Of the bytes that rows add: after a batch that did not fit.
_NOTCH = 0.7


class Room(Protocol):
    """Decides how many rows are generated for at once. It only becomes smaller."""

    @property
    def prefill_tokens(self) -> int:
        """Most tokens, padding included, that prompts have together in one pass; a longer prompt passes alone."""
        ...

    def rows(self, columns: int) -> int:
        """Rows of a cache that holds so many tokens of each; at least 1."""
        ...

    def shrink(self, *, rows: int, columns: int) -> None:
        """A cache of this shape, or a pass beside it, ran out of memory."""
        ...


class FixedRoom:
    """So many rows, whatever their length; half as many after each lack of memory."""

    def __init__(self, rows: int, *, prefill_tokens: int) -> None:
        assert rows > 0, "no rows at once are no work"
        self._rows = rows
        self._prefill_tokens = prefill_tokens

    @property
    def prefill_tokens(self) -> int:
        """See Room."""
        return self._prefill_tokens

    def rows(self, columns: int) -> int:
        """See Room."""
        return self._rows

    def shrink(self, *, rows: int, columns: int) -> None:
        """See Room."""
        self._rows = max(1, min(self._rows, rows) // 2)
        self._prefill_tokens = max(1, self._prefill_tokens // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """Bytes that PyTorch has allocated at the peak of generating with a cache of R rows × C columns.

    peak: of the worst case: every prompt leaves room for all new tokens and no more, every response takes them all.
    static_bytes: of them whatever the shape: the weights.
    """

    peak: Surface  # over R · C, of lines of one C
    static_bytes: int
    prefill_tokens: int
    scale: float = 1.0  # measured over predicted, of what the shape adds

    def peak_bytes(self, rows: int, columns: int) -> float:
        """Predicted for R rows × C columns."""
        return float(self.static_bytes + self.scale * (self.peak(rows, columns) - self.static_bytes))


class MemoryRoom:
    """As many rows as a cap in bytes allows."""

    def __init__(self, costs: CacheCosts, *, cap_bytes: int, most_rows: int = MOST_ROWS) -> None:
        self._costs, self._cap_bytes, self._most_rows = costs, cap_bytes, most_rows
        self._prefill_tokens = costs.prefill_tokens

    @property
    def cap_bytes(self) -> int:
        """As it is now."""
        return self._cap_bytes

    @property
    def prefill_tokens(self) -> int:
        """See Room."""
        return self._prefill_tokens

    def rows(self, columns: int) -> int:
        """See Room."""
        rows = np.arange(1, self._most_rows + 1)
        static_bytes, scale = self._costs.static_bytes, self._costs.scale
        peaks = static_bytes + scale * (self._costs.peak(rows, columns) - static_bytes)
        return max(1, int(np.count_nonzero(peaks <= self._cap_bytes)))

    def shrink(self, *, rows: int, columns: int) -> None:
        """See Room."""
        reached = min(self._costs.peak_bytes(rows, columns), float(self._cap_bytes))
        self._cap_bytes = int(self._costs.static_bytes + _NOTCH * (reached - self._costs.static_bytes))
        self._prefill_tokens = max(1, self._prefill_tokens // 2)
