"""From timed micro-batches to seconds of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from brim.batching.surface import Surface

_MOST_BENDS = 2
_ROUNDS = 8  # of weights by residuals
_LEAST_NOISE = 0.02  # relative: what is nearer to the model than that is no outlier
_TOLERANCE = 1.345  # of the noise, from where on a sample counts less: Huber (1964), 95% efficient where none is off


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSample:
    """A shape that was timed, once its first call, which warms up, was over."""

    rows: int
    length: int  # tokens of each row, padding included
    seconds: tuple[float, ...]  # of each call

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    @property
    def median_s(self) -> float:
        """Of two the smaller: what disturbs a call makes it longer."""
        return median_low(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFit:
    """Seconds of a micro-batch as a + b·N + c·N·T + Σ d·max(N − n, 0), none of them negative; N = rows × T tokens.

    So it is convex in N, and rises no slower for longer rows: a floor, a straight line and what grows worse than in
    proportion, such as on a CPU whose caches the activations leave.
    """

    fixed_s: float  # a
    token_s: float  # b
    attention_s: float  # c
    bends: tuple[tuple[int, float], ...]  # n and d
    relative_error: float  # root mean square of (model − median) ÷ median, over the samples
    num_samples: int

    def surface(self, *, shortest: int, longest: int, most_rows: int) -> Surface:
        """For rows of these lengths; exact, since all of it is straight between bends."""
        most = most_rows * longest
        bends = sorted({bend for bend, _ in self.bends if bend < most} | {most})
        lengths = (shortest, longest) if shortest < longest and self.attention_s else (longest,)
        return Surface(
            base=self.fixed_s,
            lengths=lengths,
            tokens=(tuple(bends),) * len(lengths),
            values=tuple(tuple(self.seconds(num_tokens, length) for num_tokens in bends) for length in lengths),
        )

    def seconds(self, num_tokens: float, length: float) -> float:
        """Of one shape."""
        bent = sum(slope * max(num_tokens - bend, 0) for bend, slope in self.bends)
        return self.fixed_s + (self.token_s + self.attention_s * length) * num_tokens + bent


def fit_time(samples: Sequence[TimeSample]) -> TimeFit:
    """Least squares of relative errors over the medians, in which outliers count less.

    Bends are taken up while they tell more than they cost by Akaike's criterion, corrected for few samples.
    """
    assert samples, "nothing was timed"
    num_tokens = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
    lengths = np.array([sample.length for sample in samples], dtype=np.float64)
    medians = np.array([sample.median_s for sample in samples])
    columns = [np.ones(len(samples)), num_tokens]
    has_lengths = len(set(lengths)) > 1
    if has_lengths:
        columns.append(num_tokens * lengths)
    bends: list[int] = []
    best = _robust(columns, medians)
    for _ in range(_MOST_BENDS):
        tried = [(_robust([*columns, np.maximum(num_tokens - n, 0)], medians), n) for n in _between(num_tokens, bends)]
        if not tried:
            break
        found, bend = min(tried, key=lambda each: each[0].criterion)
        if found.criterion >= best.criterion:
            break
        best, bends = found, [*bends, bend]
        columns.append(np.maximum(num_tokens - bend, 0))
    solved = best.solution.tolist()
    straight = 3 if has_lengths else 2
    return TimeFit(
        fixed_s=solved[0],
        token_s=solved[1],
        attention_s=solved[2] if has_lengths else 0.0,
        bends=tuple((bend, slope) for bend, slope in sorted(zip(bends, solved[straight:], strict=True)) if slope),
        relative_error=float(np.sqrt(np.mean(best.residuals**2))),
        num_samples=len(samples),
    )


@dataclass(frozen=True, slots=True)
class _Solved:
    solution: NDArray[np.float64]
    residuals: NDArray[np.float64]  # relative, of each sample
    criterion: float


def _robust(columns: Sequence[NDArray[np.float64]], values: NDArray[np.float64]) -> _Solved:
    system = np.stack(columns, axis=1) / values[:, None]
    weights = np.ones(len(values))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        solution = _not_negative(system * root[:, None], root)
        residuals = system @ solution - 1.0
        noise = max(1.4826 * float(np.median(np.abs(residuals))), _LEAST_NOISE)
        weights = np.minimum(1.0, _TOLERANCE * noise / np.maximum(np.abs(residuals), 1e-300))
    return _Solved(solution, residuals, _criterion(residuals, weights, system.shape[1]))


def _criterion(residuals: NDArray[np.float64], weights: NDArray[np.float64], num_terms: int) -> float:
    """AICc; infinite where there are too few samples to tell. Timings are not known better than _LEAST_NOISE."""
    number, spare = len(residuals), len(residuals) - num_terms - 1
    if spare <= 0:
        return math.inf
    squares = max(float(np.mean(weights * residuals**2)), _LEAST_NOISE**2)
    return number * math.log(squares) + 2 * num_terms * number / spare


def _not_negative(system: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no negative term, exact: the best of all choices of terms; there are five at most."""
    number = system.shape[1]
    scale = np.abs(system).max(axis=0)
    best, least = np.zeros(number), float(wanted @ wanted)
    for size in range(1, number + 1):
        for chosen in map(list, combinations(range(number), size)):
            solved, *_ = np.linalg.lstsq(system[:, chosen] / scale[chosen], wanted, rcond=1e-10)
            misses = system[:, chosen] / scale[chosen] @ solved - wanted
            if solved.min() >= 0 and misses @ misses < least * (1 - 1e-12):
                best, least = np.zeros(number), float(misses @ misses)
                best[chosen] = solved / scale[chosen]
    return best


def _between(num_tokens: NDArray[np.float64], taken: Sequence[int]) -> list[int]:
    """Where the model may bend: at samples that have others on both sides."""
    return [int(number) for number in np.unique(num_tokens)[1:-1] if number not in taken]
