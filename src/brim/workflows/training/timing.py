"""Time shapes of a micro-batch on the local device, within a limit, and fit seconds for any shape.

It also decides which shapes are worth timing before a run, and whether any is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median_low
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Costs, Surface
from brim.planning.costs import Shape
from brim.units import format_seconds

_MOST_S = 30.0


_SHARE_OF_RUN = 0.02


CALLS = 3  # of each shape; the first one warms up: caches of primitives, choices of kernels, the allocator


_LEAST_SHAPES = 4  # a floor, a slope by tokens, one by length, and one to see whether the slope rises


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Say what to time. Without shapes, `reason` says why not, and the estimate stays."""

    shapes: tuple[Shape, ...]  # (rows, tokens), the most informative first
    allowed_s: float
    reason: str = ""

    @classmethod
    def of(cls, lengths: ArrayLike, *, costs: Costs, cap_bytes: int, most_rows: int, run_s: float) -> Timing:
        """Return shapes that a run over rows of these lengths uses, all under the cap, and the seconds for them.

        Their lengths are those of rows that there are. costs.time: an estimate, by which the first shapes are afforded.
        run_s: the run's estimated seconds, of which a small share may go into timing.
        """
        allowed_s = min(_SHARE_OF_RUN * run_s, _MOST_S)
        shapes = [
            (rows, length)
            for rows, length in _ladder(np.asarray(lengths, dtype=np.int64), most_rows)
            if costs.peak_bytes(rows, length) <= cap_bytes
        ]
        needed_s = CALLS * sum(float(costs.seconds(rows, length)) for rows, length in shapes[:_LEAST_SHAPES])
        reason = ""
        if len(shapes) < _LEAST_SHAPES:
            reason = f"not measured: only {len(shapes)} of the shapes worth timing fit under the cap"
        elif needed_s > allowed_s:
            reason = (
                f"not measured: timing takes about {format_seconds(needed_s)}, more than {format_seconds(allowed_s)}: "
                f"{_SHARE_OF_RUN:.0%} of the run, {format_seconds(_MOST_S)} at most"
            )
        return cls(shapes=() if reason else tuple(shapes), allowed_s=allowed_s, reason=reason)

    def measured(
        self, run: Callable[[int, int], None], clock: Callable[[], float], *, predicted: Surface
    ) -> tuple[TimeSample, ...]:
        """Return the shapes that could be timed before the time was up.

        run: forward and backward pass of (rows, tokens), which leaves no trace; what it raises is passed on. clock:
        seconds, once all that was asked of the device is done. predicted: seconds by the estimate; how far it was off
        so far tells whether the next shape can still be afforded.
        """
        started = clock()
        samples: list[TimeSample] = []
        for rows, length in self.shapes:
            needed_s = CALLS * _off_by(samples, predicted) * float(predicted(rows, length))
            if samples and clock() - started + needed_s > self.allowed_s:
                continue  # a smaller one may come
            samples.append(TimeSample(rows=rows, length=length, seconds=_timed(run, clock, rows, length)))
            if clock() - started > self.allowed_s:
                break
        return tuple(samples)


def _ladder(lengths: NDArray[np.int64], most_rows: int) -> list[Shape]:
    """Return one row of short and of long length, as many tokens of short rows as of the long one, then ever more.

    The first four of them tell a floor, N, N·T and a rising slope apart, and all first ones do.
    """
    short, middle, long = (int(np.percentile(lengths, q, method="inverted_cdf")) for q in (10, 50, 90))
    alike = min(max(long // short, 2), most_rows)
    first = [(1, short), (alike, short), (1, long), (min(2 * alike, most_rows), short)]
    doubling = [2**power for power in range(most_rows.bit_length())]
    further = [(rows, length) for rows in doubling for length in (middle, long)]
    further.sort(key=lambda shape: shape[0] * shape[1])
    return list(dict.fromkeys([*first, *further]))


def _timed(run: Callable[[int, int], None], clock: Callable[[], float], rows: int, length: int) -> tuple[float, ...]:
    seconds = []
    for _ in range(CALLS):
        before = clock()
        run(rows, length)
        seconds.append(clock() - before)
    return tuple(seconds[1:])


def _off_by(samples: list[TimeSample], predicted: Surface) -> float:
    """Return measured over predicted, of the largest shape so far."""
    if not samples:
        return 1.0
    largest = max(samples, key=lambda sample: sample.num_tokens)
    return largest.median_s / max(float(predicted(largest.rows, largest.length)), 1e-9)


Floats: TypeAlias = NDArray[np.float64]
_Term: TypeAlias = Literal["estimate", "fixed", "tokens", "attention"] | int  # a number: where a bend is


_MOST_BENDS = 2


_ROUNDS = 8  # of weights by residuals


_LEAST_NOISE = 0.01  # relative: what is nearer to the model than that is no outlier


_TOLERANCE = 1.345  # of the noise, from where on a sample counts less: Huber (1964), 95% efficient where none is off


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSample:
    """Hold a shape that was timed, once its first call, which warms up, was over."""

    rows: int
    length: int  # tokens of each row, padding included
    seconds: tuple[float, ...]  # of each call

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    @property
    def median_s(self) -> float:
        """Return the median; of two the smaller, since what disturbs a call makes it longer."""
        return median_low(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFit:
    """Predict a micro-batch's seconds as s·estimate + a + b·N + c·N·T + Σ d·max(N − n, 0); N = rows × T tokens.

    None of the terms is negative, so it is convex in N and rises no slower for longer rows, as the estimate does. Few
    samples settle how much slower the device is than estimated; more of them a floor, slopes by tokens and length, and
    what grows worse than in proportion, such as on a CPU whose caches the activations leave.
    """

    estimated: Surface
    scale: float  # s
    fixed_s: float  # a
    token_s: float  # b
    attention_s: float  # c
    bends: tuple[tuple[int, float], ...]  # n and d
    relative_error: float  # root mean square of (model − median) ÷ median, over the samples

    @classmethod
    def through(cls, samples: Sequence[TimeSample], estimated: Surface) -> TimeFit:
        """Fit the medians by least squares of relative errors, in which outliers count less.

        Terms beside the estimate are added while they explain more than they cost by Akaike's criterion, corrected for
        few samples.
        """
        assert samples, "nothing was timed"
        num_tokens = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
        lengths = np.array([sample.length for sample in samples], dtype=np.float64)
        medians = np.array([sample.median_s for sample in samples])
        terms: dict[_Term, Floats] = {
            "estimate": estimated(num_tokens / lengths, lengths),
            "fixed": np.ones(len(samples)),
            "tokens": num_tokens,
            "attention": num_tokens * lengths,
        }
        # The model may bend at samples that have others on both sides.
        terms |= {int(bend): np.maximum(num_tokens - bend, 0) for bend in np.unique(num_tokens)[1:-1]}
        solved = _selected(terms, medians)
        found = dict(zip(solved.terms, solved.solution.tolist(), strict=True))
        return cls(
            estimated=estimated,
            scale=found["estimate"],
            fixed_s=found.get("fixed", 0.0),
            token_s=found.get("tokens", 0.0),
            attention_s=found.get("attention", 0.0),
            bends=tuple((term, found[term]) for term in sorted(t for t in found if isinstance(t, int)) if found[term]),
            relative_error=float(np.sqrt(np.mean(solved.residuals**2))),
        )

    def surface(self, *, shortest: int, longest: int, most_rows: int) -> Surface:
        """Return the surface for rows of these lengths; exact, since all terms are straight between bends."""
        most = most_rows * longest
        tokens = sorted({*map(int, self.estimated.kinks), *(bend for bend, _ in self.bends), most})
        lengths = sorted({*self.estimated.lengths, shortest, longest})
        grid = np.array(tokens, dtype=np.float64)
        return Surface(
            base=self.scale * self.estimated.base + self.fixed_s,
            lengths=tuple(lengths),
            tokens=(tuple(tokens),) * len(lengths),
            values=tuple(tuple(self.seconds(grid, length).tolist()) for length in lengths),
        )

    def seconds(self, num_tokens: ArrayLike, length: float) -> Floats:
        """Return the seconds of shapes of one length."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        straight = self.fixed_s + (self.token_s + self.attention_s * length) * tokens
        bent = sum((slope * np.maximum(tokens - bend, 0) for bend, slope in self.bends), np.zeros(tokens.shape))
        return np.asarray(self.scale * self.estimated(tokens / length, length) + straight + bent)


@dataclass(frozen=True, slots=True)
class _Solved:
    terms: tuple[_Term, ...]
    solution: Floats
    residuals: Floats  # relative, of each sample
    criterion: float


def _selected(terms: Mapping[_Term, Floats], values: Floats) -> _Solved:
    """Return the best choice of straight terms, and then one bend after the other."""
    straight: tuple[_Term, ...] = ("fixed", "tokens", "attention")
    choices = [("estimate", *chosen) for size in range(len(straight) + 1) for chosen in combinations(straight, size)]
    best = min((_robust(choice, terms, values) for choice in choices), key=lambda each: each.criterion)
    for _ in range(_MOST_BENDS):
        bends = [term for term in terms if isinstance(term, int) and term not in best.terms]
        tried = [_robust((*best.terms, bend), terms, values) for bend in bends]
        better = min(tried, key=lambda each: each.criterion, default=best)
        if better.criterion >= best.criterion:
            break
        best = better
    return best


def _robust(chosen: tuple[_Term, ...], terms: Mapping[_Term, Floats], values: Floats) -> _Solved:
    system = np.stack([terms[term] for term in chosen], axis=1) / values[:, None]
    weights = np.ones(len(values))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        solution = _not_negative(system * root[:, None], root)
        residuals = system @ solution - 1.0
        noise = max(1.4826 * float(np.median(np.abs(residuals))), _LEAST_NOISE)
        weights = np.minimum(1.0, _TOLERANCE * noise / np.maximum(np.abs(residuals), 1e-300))
    losses = weights * (2 - weights) * residuals**2  # Huber's: straight where a sample counts less
    return _Solved(chosen, solution, residuals, _criterion(losses, len(chosen)))


def _criterion(losses: Floats, num_terms: int) -> float:
    """Return AICc; infinite where there are too few samples. Timings are not known better than _LEAST_NOISE."""
    number, spare = len(losses), len(losses) - num_terms - 1
    if spare <= 0:
        return math.inf
    squares = max(float(np.mean(losses)), _LEAST_NOISE**2)
    return number * math.log(squares) + 2 * num_terms * number / spare


def _not_negative(system: Floats, wanted: Floats) -> Floats:
    """Return least squares with no negative term, by the active-set method of Lawson and Hanson (1974), chapter 23."""
    scale = np.abs(system).max(axis=0)
    scaled = system / scale
    solution = np.zeros(system.shape[1])
    free = np.zeros(system.shape[1], dtype=bool)
    for _ in range(3 * system.shape[1]):
        pull = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ solution))
        if pull.max() <= 1e-10:
            break
        free[int(pull.argmax())] = True
        solution = _within(scaled, wanted, solution, free)
    return np.asarray(solution / scale)


def _within(system: Floats, wanted: Floats, start: Floats, free: NDArray[np.bool_]) -> Floats:
    """Return least squares over the free terms; those that would turn negative are taken out of `free`."""
    solution = start
    while free.any():
        aim = np.zeros(len(start))
        aim[free] = np.linalg.lstsq(system[:, free], wanted, rcond=1e-10)[0]
        bad = free & (aim <= 0)
        if not bad.any():
            return aim
        steps = np.where(bad, solution / (solution - aim + 1e-300), np.inf)
        first = int(steps.argmin())
        solution = np.maximum(solution + steps[first] * (aim - solution), 0.0)
        solution[first], free[first] = 0.0, False
    return np.zeros(len(start))
