"""When waiting rows take the place of those that have ended, and which of them are read in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rows_to_wait_for(rows: int, response_tokens: float) -> int:
    """Free slots at which it pays to fill them, in a cache of so many rows; at least 1.

    A pass over prompts reads the weights once more, as a step of all rows does: with k rows a pass, a response of
    `response_tokens` steps shares R / (k · response_tokens) of it per step. Until then k / 2 of R slots stand empty in
    the mean. The sum is least at k = R · sqrt(2 / response_tokens).
    """
    best = rows * math.sqrt(2 / max(response_tokens, 1.0))
    return max(1, min(round(best), rows // 2))


def prefill_groups(lengths: Sequence[int], *, most_tokens: int) -> list[range]:
    """Neighbours that are read together: rows × longest is at most `most_tokens`, or it is one row alone."""
    groups: list[range] = []
    start, longest = 0, 0
    for position, length in enumerate(lengths):
        longest = max(longest, length)
        if position > start and (position + 1 - start) * longest > most_tokens:
            groups.append(range(start, position))
            start, longest = position, length
    return [*groups, range(start, len(lengths))] if lengths else []
