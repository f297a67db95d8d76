"""The work of a micro-batch of any shape, from that of a few shapes that were traced."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.memory.work import Work, WorkCount, WorkPhase, WorkPlace
from brim.planning.shape_cache import Shape

# Below it some libraries have kernels of their own: bitsandbytes takes another product up to 4 tokens.
_LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLaw:
    """FLOPs, bytes and kernels of each place as a + b·N + c·N·T, N = rows × T tokens.

    Of a transformer that is exact: weights are read once whatever the shape, what a token does is N's, and scores of
    attention are N·T's. The loss in chunks starts its kernels in steps of a chunk, which this draws as a line.
    """

    places: tuple[WorkPlace, ...]  # K
    flops: NDArray[np.float64]  # [K, 3]: a, b, c
    num_bytes: NDArray[np.float64]  # [K, 3]
    kernels: NDArray[np.float64]  # [K, 3]

    def at(
        self, num_tokens: ArrayLike, length: ArrayLike
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """FLOPs, bytes and kernels [K, S] of S shapes."""
        features = _features(num_tokens, length)
        flops, num_bytes, kernels = (
            np.maximum(law @ features, 0.0) for law in (self.flops, self.num_bytes, self.kernels)
        )
        return flops, num_bytes, kernels

    def of(self, phase: WorkPhase) -> WorkLaw:
        """Of one phase alone."""
        chosen = [number for number, place in enumerate(self.places) if place.phase == phase]
        return WorkLaw(
            places=tuple(self.places[number] for number in chosen),
            flops=self.flops[chosen],
            num_bytes=self.num_bytes[chosen],
            kernels=self.kernels[chosen],
        )


def work_law(counts: Mapping[Shape, WorkCount]) -> WorkLaw:
    """Through these shapes. Where all are of one length, it holds for that length.

    Where there are fewer shapes than the law has terms, `shapes_to_count` says which ones are missing.
    """
    shapes = _usable(counts)
    return law_through([(rows * tokens, tokens, counts[rows, tokens]) for rows, tokens in shapes])


def law_through(counted: Sequence[tuple[int, int, WorkCount]]) -> WorkLaw:
    """Through passes over N tokens, each of which attends to T: (N, T, work)."""
    places = tuple(dict.fromkeys(place for _, _, work in counted for place in work.places))
    nothing = Work(0, 0, 0)
    found = [[work.places.get(place, nothing) for _, _, work in counted] for place in places]
    num_tokens, lengths = (np.array([each[axis] for each in counted], dtype=np.float64) for axis in (0, 1))
    features = _features(num_tokens, lengths)
    if len(set(lengths)) == 1:
        features[2] = 0.0  # no difference can be seen between N and N·T
    return WorkLaw(
        places=places,
        flops=_fitted(features, [[work.flops for work in line] for line in found]),
        num_bytes=_fitted(features, [[work.num_bytes for work in line] for line in found]),
        kernels=_fitted(features, [[work.kernels for work in line] for line in found]),
    )


def shapes_to_count(known: Collection[Shape], *, longest: int, short: int, most_rows: int) -> list[Shape]:
    """Shapes that have to be traced besides those that are known, so that a law can be drawn; none or few."""
    usable = [shape for shape in known if shape[0] * shape[1] >= _LEAST_TOKENS]
    wanted = [(1, longest), (min(2, most_rows), longest)] + ([(most_rows, short)] if 2 * short <= longest else [])
    missing: list[Shape] = []
    for shape in wanted:
        if shape not in usable and _rank([*usable, *missing, shape]) > _rank([*usable, *missing]):
            missing.append(shape)
    return missing


def _usable(counts: Mapping[Shape, WorkCount]) -> list[Shape]:
    large = sorted(shape for shape in counts if shape[0] * shape[1] >= _LEAST_TOKENS)
    return large or sorted(counts)


def _features(num_tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
    """[3, S]: 1, N, N·T."""
    tokens, lengths = np.broadcast_arrays(np.atleast_1d(num_tokens), np.atleast_1d(length))
    return np.stack([np.ones(tokens.shape), tokens.astype(np.float64), tokens * lengths.astype(np.float64)])


def _fitted(features: NDArray[np.float64], values: list[list[int]]) -> NDArray[np.float64]:
    """Least squares of relative errors: most values are in proportion to N. values: [K, S]. Returns [K, 3]."""
    weights = 1.0 / features[1]
    scale = np.maximum(np.abs(features * weights).max(axis=1), 1e-300)
    system = (features * weights / scale[:, None]).T
    wanted = (np.array(values, dtype=np.float64).reshape(len(values), -1) * weights).T
    solved, *_ = np.linalg.lstsq(system, wanted, rcond=1e-9)
    return np.asarray((solved / scale[:, None]).T)


def _rank(shapes: Collection[Shape]) -> int:
    if not shapes:
        return 0
    rows, lengths = np.array(sorted(shapes), dtype=np.float64).T
    features = _features(rows * lengths, lengths)
    return int(np.linalg.matrix_rank(features / np.abs(features).max(axis=1, keepdims=True), tol=1e-6))
