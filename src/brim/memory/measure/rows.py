"""Random token rows of asked lengths, in the order in which the loop will take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.data import TokenRows
from brim.data.order import rows_of_step
from brim.data.rows import TokenRow


def random_rows(lengths: Sequence[int], *, vocabulary: int, supervised: bool, seed: int) -> TokenRows:
    """One row a length. supervised: all tokens are learned from; else none, so that the rows are prompts."""
    generator = np.random.default_rng(seed)
    return TokenRows.from_rows(
        TokenRow(
            key=number,
            input_ids=generator.integers(0, vocabulary, length).astype(np.int32),
            supervised=np.full(length, supervised),
        )
        for number, length in enumerate(lengths)
    )


def in_order_of_steps(steps: Sequence[Sequence[int]], *, num_rows: int, seed: int) -> list[int]:
    """The length of each of `num_rows` rows, such that the loop's step k takes rows of the k-th lengths.

    Steps after the last one given are like it. All steps have the same number of rows, and `num_rows` is a multiple.
    """
    size = len(steps[0])
    lengths = [0] * num_rows
    for number in range(num_rows // size):
        _, positions = rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=number * size, size=size)
        for position, length in zip(positions, steps[min(number, len(steps) - 1)], strict=True):
            lengths[int(position)] = length
    return lengths
