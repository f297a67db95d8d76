"""What a job has done, held in memory: for one that nobody will go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from brim.infer.journal import Record, UInts


class Records(Protocol):
    """What a journal keeps on disk (see journal.py)."""

    def append(self, records: Sequence[Record]) -> None: ...
    def find(self, keys: UInts) -> NDArray[np.int64]: ...
    def prompts(self, numbers: NDArray[np.int64]) -> UInts: ...
    def body(self, number: int) -> bytes: ...
    def __len__(self) -> int: ...


class HeldRecords:
    """Records by their number."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def __len__(self) -> int:
        return len(self._records)

    def append(self, records: Sequence[Record]) -> None:
        """See Journal."""
        self._records += records

    def find(self, keys: UInts) -> NDArray[np.int64]:
        """See Journal."""
        numbers = {record.key: number for number, record in enumerate(self._records)}
        return np.array([numbers.get(key, -1) for key in keys.tolist()], dtype=np.int64)

    def prompts(self, numbers: NDArray[np.int64]) -> UInts:
        """See Journal."""
        return np.array([self._records[number].prompt for number in numbers.tolist()], dtype=np.uint64)

    def body(self, number: int) -> bytes:
        """See Journal."""
        return self._records[number].body
