"""Examples whose input is most like a row's own: exact nearest neighbours by cosine, in blocks.

Exact and with numpy alone: a block of rows against a block of examples is one product of matrices, so that memory is
flat, and the result depends on no index's settings. Embeddings lie on the unit sphere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from brim.data.example_pool import NONE, Positions

# Examples at once: with 1,024 rows 16 MiB of likenesses, and long enough for the product to run at full speed.
_BLOCK_EXAMPLES = 4096
# Candidates beside the k best, which are compared once more in float64: those whose float32 likenesses may be in
# another order, since a product's last bits depend on the shape of its block.
_SPARE = 16

Embeddings = npt.NDArray[np.float32]  # [N, D], each of length 1; may be mapped from disk


class SentenceEncoder(Protocol):
    """Texts to embeddings."""

    @property
    def identity(self) -> str:
        """What changes when the model does."""

    def encode(self, texts: Sequence[str]) -> Embeddings:
        """One row of length 1 a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestExamples:
    """The examples most like each row's input, the most like first."""

    embeddings: Embeddings  # of the pool, by position
    encoder: SentenceEncoder
    num_examples: int

    def choose(self, inputs: Sequence[str], own: Positions) -> Positions:
        """Positions [B, k] in the pool, none of a row twice and none its own; own: NONE where it has none there."""
        return nearest(self._embedded(inputs, own), self.embeddings, own, self.num_examples)

    def _embedded(self, inputs: Sequence[str], own: Positions) -> Embeddings:
        """An input that is in the pool has its embedding there."""
        queries = np.empty((len(inputs), self.embeddings.shape[1]), np.float32)
        is_known = own != NONE
        queries[is_known] = self.embeddings[own[is_known]]
        if not is_known.all():
            queries[~is_known] = self.encoder.encode([inputs[row] for row in np.flatnonzero(~is_known).tolist()])
        return queries


def nearest(queries: Embeddings, embeddings: Embeddings, own: Positions, num_examples: int) -> Positions:
    """The `num_examples` embeddings of the largest product with each query, in falling order, without its own.

    Of equally near ones, the first.
    """
    num_kept = min(num_examples + _SPARE, len(embeddings))
    best = np.full((len(queries), num_kept), -np.inf, np.float32)
    positions = np.zeros((len(queries), num_kept), np.int64)
    for start in range(0, len(embeddings), _BLOCK_EXAMPLES):
        block = np.asarray(embeddings[start : start + _BLOCK_EXAMPLES])
        likeness = queries @ block.T
        rows = np.flatnonzero((own >= start) & (own < start + len(block)))
        likeness[rows, own[rows] - start] = -np.inf
        best, positions = _kept(best, positions, likeness, start)
    return _in_order(queries, embeddings, best, positions)[:, :num_examples]


def _kept(
    best: npt.NDArray[np.float32], positions: Positions, likeness: npt.NDArray[np.float32], start: int
) -> tuple[npt.NDArray[np.float32], Positions]:
    """The best so far and a block's, as many as were kept; in no order."""
    num_kept = best.shape[1]
    in_block = np.broadcast_to(np.arange(start, start + likeness.shape[1]), likeness.shape)
    if likeness.shape[1] > num_kept:
        top = np.argpartition(-likeness, num_kept - 1, axis=1)[:, :num_kept]
        likeness, in_block = np.take_along_axis(likeness, top, 1), top + start
    likeness, in_block = np.hstack([best, likeness]), np.hstack([positions, in_block])
    top = np.argpartition(-likeness, num_kept - 1, axis=1)[:, :num_kept]
    return np.take_along_axis(likeness, top, 1), np.take_along_axis(in_block, top, 1)


def _in_order(
    queries: Embeddings, embeddings: Embeddings, best: npt.NDArray[np.float32], positions: Positions
) -> Positions:
    """Candidates by their likeness in float64, added up in one order for all; then by position."""
    ordered = np.empty_like(positions)
    for row, (query, candidates) in enumerate(zip(queries.astype(np.float64), positions, strict=True)):
        exact = (np.asarray(embeddings[candidates], np.float64) * query).sum(axis=1)
        exact[np.isneginf(best[row])] = -np.inf
        ordered[row] = candidates[np.lexsort((candidates, -exact))]
    return ordered
