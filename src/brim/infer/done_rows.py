"""Which of some rows are done, and what was done for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from brim.infer.held_records import Records
from brim.infer.journal import Record, UInts


class DoneRows:
    """Rows by their position, over records by their keys.

    keys: of the rows. prompts: hashes of what the rows are to be done for. A record of the same key for another prompt
    does not count: `changed` are the positions of such rows.
    """

    def __init__(self, records: Records, *, keys: UInts, prompts: UInts) -> None:
        self._records, self._keys, self._prompts = records, keys, prompts
        self._numbers = records.find(keys)
        found = np.flatnonzero(self._numbers >= 0)
        self.num_found = len(found)
        self.changed = found[records.prompts(self._numbers[found]) != prompts[found]]
        self._numbers[self.changed] = -1

    @property
    def num_done(self) -> int:
        return int(np.count_nonzero(self._numbers >= 0))

    def to_do(self) -> NDArray[np.intp]:
        """Positions of the rows that are not done yet."""
        return np.flatnonzero(self._numbers < 0)

    def add(self, positions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """These rows are done."""
        first = len(self._records)
        self._records.append(
            [
                Record(key=int(self._keys[position]), prompt=int(self._prompts[position]), body=body)
                for position, body in zip(positions, bodies, strict=True)
            ]
        )
        self._numbers[list(positions)] = np.arange(first, first + len(positions))

    def body(self, position: int) -> bytes:
        """What was done for a row that is done."""
        return self._records.body(int(self._numbers[position]))
