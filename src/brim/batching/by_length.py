"""Micro-batches by length: as many rows together as take the least time under a cap in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.cap import Cap
from brim.batching.costs import Costs
from brim.batching.cutter import CapChange
from brim.batching.in_order import groups_in_order
from brim.batching.microbatch import MicroBatch, cut, priced

# What is left, of the bytes that the shape adds, after memory ran out: two such steps are less than a half, so that a
# memory model that promises twice the room is corrected by the second.
_NOTCH = 0.7


class ByLength:
    """A Cutter. Its costs are those of the launch, also in a resumed run."""

    def __init__(self, *, costs: Costs, cap_bytes: int, most_rows: int | None = None, largest: bool = False) -> None:
        """cap_bytes: allocated bytes that a micro-batch may reach. largest: the fewest micro-batches (see cut)."""
        self._costs = costs
        self._cap = Cap(now=cap_bytes)
        self._most_rows = most_rows
        self._largest = largest

    @property
    def cap_bytes(self) -> int:
        """As it is now."""
        return self._cap.now

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """See Cutter."""
        return cut(
            lengths,
            costs=self._costs,
            cap_bytes=self._cap.now,
            most_rows=self._most_rows,
            largest=self._largest,
            lone_rows_may_exceed=True,
        )

    def cut_in_order(self, lengths: ArrayLike, *, num_groups: int) -> list[MicroBatch]:
        """See Cutter."""
        tokens = np.asarray(lengths, dtype=np.int64)
        groups = groups_in_order(
            len(tokens), num_groups=num_groups, longest=lambda start, most: self._rows_that_fit(tokens[start:], most)
        )
        borders = [0, *(stop for _, stop in groups)]
        return priced(np.arange(len(tokens)), tokens, borders, self._costs) if groups else []

    def lower(self, failed: MicroBatch) -> CapChange | None:
        """See Cutter."""
        if failed.num_rows == 1:
            return None
        assert failed.peak_bytes is not None, "a micro-batch that this cutter has not cut"
        static_bytes = self._costs.static_bytes
        added_bytes = min(self._cap.now, failed.peak_bytes) - static_bytes
        to = min(static_bytes + int(_NOTCH * added_bytes), failed.peak_bytes - 1)
        return self._change(self._cap.lowered(to, failed=failed.peak_bytes))

    def clean_step(self) -> CapChange | None:
        """See Cutter."""
        return self._change(self._cap.after_clean_step())

    def state(self) -> dict[str, Any]:
        """See Cutter."""
        return {
            "kind": "by_length",
            "costs": self._costs.as_dict(),
            "cap": self._cap.as_dict(),
            "most_rows": self._most_rows,
            "largest": self._largest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Cutter."""
        assert state["kind"] == "by_length", "the state of another cutter"
        self._costs = Costs.from_dict(state["costs"])
        self._cap = Cap.from_dict(state["cap"])
        self._most_rows = state["most_rows"]
        self._largest = state["largest"]

    def _rows_that_fit(self, tokens: NDArray[np.int64], most: int) -> int:
        """How many of the first rows fit together, at most so many; at least 1. With fewer of them nothing is over."""
        padded = np.maximum.accumulate(tokens[: most if self._most_rows is None else min(most, self._most_rows)])
        over = self._costs.peak_bytes(np.arange(1, len(padded) + 1), padded) > self._cap.now
        return max(1, int(over.argmax()) if over.any() else len(padded))

    def _change(self, cap: Cap) -> CapChange | None:
        before, self._cap = self._cap, cap
        if before.now == cap.now:
            return None
        return CapChange(before=before.now, after=cap.now, unit="bytes")
