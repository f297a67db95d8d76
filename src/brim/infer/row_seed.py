"""A seed for one row, for engines that draw their own numbers."""

from __future__ import annotations

import numpy as np

_MOST = 2**63 - 1  # signed, as some engines keep it


def row_seed(seed: int, key: int) -> int:
    """The same for the same seed and row key, whatever else is generated; from 0 to 2^63 - 1."""
    state = np.random.SeedSequence([abs(seed), abs(key)]).generate_state(1, np.uint64)
    return int(state[0]) & _MOST
