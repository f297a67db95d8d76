"""Examples drawn by chance: for each row its own, which the seed and the row's input alone decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brim.data.example_pool import NONE, Positions, digests_of

_RETRIEVAL = 4  # ends the entropy, so that the draws of one seed do not repeat those of splits, samples and epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomExamples:
    """Draws from a pool of so many examples.

    No state, and no row's number: a row has the same examples wherever it stands and in whatever company.
    """

    num_pooled: int
    num_examples: int
    seed: int

    def choose(self, inputs: Sequence[str], own: Positions) -> Positions:
        """Positions [B, k] in the pool, none of a row twice and none its own; own: NONE where it has none there."""
        rows = zip(digests_of(inputs).tolist(), own.tolist(), strict=True)
        return np.array([self._drawn(*row) for row in rows], np.int64).reshape(len(inputs), self.num_examples)

    def _drawn(self, digest: int, own: int) -> list[int]:
        if own == NONE:
            return drawn(self.num_pooled, self.num_examples, self.seed, digest, _RETRIEVAL)
        others = drawn(self.num_pooled - 1, self.num_examples, self.seed, digest, _RETRIEVAL)
        return [position + (position >= own) for position in others]


def drawn(population: int, size: int, *entropy: int) -> list[int]:
    """`size` different numbers below `population`, in a random order, from these numbers as entropy.

    The first steps of a Fisher-Yates shuffle, of which only what was moved is kept. A remainder of 64 random bits
    favours no number by more than population / 2^64.
    """
    assert size <= population, "who asks has counted"
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size).tolist()
    moved: dict[int, int] = {}
    picked = []
    for step, random in enumerate(bits):
        at = step + random % (population - step)
        picked.append(moved.get(at, at))
        moved[at] = moved.get(step, step)
    return picked
