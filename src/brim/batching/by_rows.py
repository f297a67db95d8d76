"""Micro-batches of a fixed number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from brim.batching.cap import Cap
from brim.batching.cutter import CapChange
from brim.batching.in_order import groups_in_order
from brim.batching.microbatch import MicroBatch, cut_by_rows


class ByRows:
    """A Cutter: neighbours in length together, the longest first; half as many rows once memory has run out."""

    def __init__(self, *, max_rows: int) -> None:
        self._cap = Cap(now=max_rows)

    @property
    def max_rows(self) -> int:
        """As it is now."""
        return self._cap.now

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """See Cutter."""
        tokens = np.asarray(lengths, dtype=np.int64)
        cuts = cut_by_rows(tokens, max_rows=self._cap.now)
        return [MicroBatch(rows=rows, padded_length=int(tokens[rows[0]])) for rows in cuts]

    def cut_in_order(self, lengths: ArrayLike, *, num_groups: int) -> list[MicroBatch]:
        """See Cutter."""
        tokens = np.asarray(lengths, dtype=np.int64)
        groups = groups_in_order(
            len(tokens), num_groups=num_groups, longest=lambda start, most: min(most, self._cap.now)
        )
        return [
            MicroBatch(rows=np.arange(start, stop), padded_length=int(tokens[start:stop].max()))
            for start, stop in groups
        ]

    def lower(self, failed: MicroBatch) -> CapChange | None:
        """See Cutter."""
        if failed.num_rows == 1:
            return None
        return self._change(self._cap.lowered(failed.num_rows // 2, failed=failed.num_rows))

    def clean_step(self) -> CapChange | None:
        """See Cutter."""
        return self._change(self._cap.after_clean_step())

    def state(self) -> dict[str, Any]:
        """See Cutter."""
        return {"kind": "by_rows", "cap": self._cap.as_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Cutter."""
        assert state["kind"] == "by_rows", "the state of another cutter"
        self._cap = Cap.from_dict(state["cap"])

    def _change(self, cap: Cap) -> CapChange | None:
        before, self._cap = self._cap, cap
        if before.now == cap.now:
            return None
        return CapChange(before=before.now, after=cap.now, unit="rows")
