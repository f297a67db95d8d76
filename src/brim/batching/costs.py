"""Predict the memory and the time of a micro-batch from its shape, and what fits under a cap.

Each prediction is a `Surface`: a quantity such as peak bytes or seconds, interpolated between samples of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LONGEST_TOKENS = 1 << 20


_FEW_ROWS = 64  # so few are looked at one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Hold the two models by which an effective batch is partitioned: fixed at launch, and kept in checkpoints.

    peak: bytes that PyTorch has allocated at the peak of a micro-batch's forward and backward pass, with weights,
    gradients and the optimizer's state beside it. static_bytes: what of it is there whatever the shape.
    scale: measured over predicted, of what the shape adds to static_bytes; 1.0 until something has been measured.
    time: seconds of a micro-batch's forward and backward pass.
    multiple: of it are the tokens of packed rows, which are filled up; 1: rows are padded.
    most_tokens: of packed rows, unless one row has more: a larger micro-batch is no faster; None: as many as fit.
    """

    peak: Surface
    static_bytes: int
    time: Surface
    scale: float = 1.0
    multiple: int = 1
    most_tokens: int | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether the rows of a micro-batch are one sequence, without padding."""
        return self.multiple > 1

    def peak_bytes(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Predict the peak of `rows` rows of `length` tokens, padding included; shapes broadcast."""
        rows = self._filled_up(rows, length)
        return np.asarray(self.static_bytes + self.scale * (self.peak(rows, length) - self.static_bytes))

    def seconds(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Predict the seconds of `rows` rows of `length` tokens, padding included; shapes broadcast."""
        return self.time(self._filled_up(rows, length), length)

    def _filled_up(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Return the rows of this length that have as many tokens as the micro-batch, filled up."""
        if not self.is_packed:
            return np.asarray(rows, dtype=np.float64)
        tokens = np.asarray(rows, dtype=np.float64) * np.asarray(length)
        filled: NDArray[np.float64] = np.ceil(np.round(tokens / self.multiple, 6)) * self.multiple
        return np.asarray(filled / np.asarray(length))

    def scale_to(self, peak_bytes: int, *, length: int) -> float:
        """Return the scale with which one row of this length, in tokens, has this peak."""
        added = float(self.peak(self._filled_up(1, length), length)) - self.static_bytes
        return (peak_bytes - self.static_bytes) / added if added > 0 else self.scale

    def rows_that_fit(
        self, lengths: ArrayLike, *, cap_bytes: int, most: int, most_seconds: float = inf
    ) -> NDArray[np.int64]:
        """Return for each length the most rows of which neither they nor any fewer are over the cap; 0: none fits.

        lengths: tokens, at least 1 each, in one dimension. most: rows beyond which nobody asks. most_seconds: that
        they may take together, which does not fall as rows are added.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        return self._that_fit(tokens, tokens, cap_bytes=cap_bytes, most=most, most_seconds=most_seconds)

    def tokens_that_fit(self, lengths: ArrayLike, *, cap_bytes: int, most: int) -> NDArray[np.int64]:
        """Return for each length the most tokens of packed rows, of which the longest is as long, that fit so.

        They are multiples of `multiple`; most: tokens beyond which nobody asks.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        units = np.full_like(tokens, self.multiple)
        return self.multiple * self._that_fit(tokens, units, cap_bytes=cap_bytes, most=-(-most // self.multiple))

    def _that_fit(
        self,
        tokens: NDArray[np.int64],
        units: NDArray[np.int64],
        *,
        cap_bytes: int,
        most: int,
        most_seconds: float = inf,
    ) -> NDArray[np.int64]:
        """Return how many units of so many tokens fit, where rows have these tokens.

        Between two kinks the peak is a straight line in the tokens, so that a number of units beside a kink is over the
        cap wherever any is: no rise and fall of the peak is overlooked.
        """

        def is_over(count: NDArray[np.int64]) -> NDArray[np.bool_]:
            shape = (-1,) + (1,) * (count.ndim - 1)
            rows, length = count * units.reshape(shape) / tokens.reshape(shape), tokens.reshape(shape)
            is_over: NDArray[np.bool_] = self.peak_bytes(rows, length) > cap_bytes
            return is_over if most_seconds == inf else is_over | (self.seconds(rows, length) > most_seconds)

        turns = self._turns(units, most)
        over = is_over(turns)
        first = np.where(over.any(axis=1), over.argmax(axis=1), turns.shape[1])
        bounds = np.concatenate([np.zeros_like(turns[:, :1]), turns, np.full_like(turns[:, :1], most + 1)], axis=1)
        fit = np.take_along_axis(bounds, first[:, None], axis=1)[:, 0]
        too_many = np.take_along_axis(bounds, first[:, None] + 1, axis=1)[:, 0]
        while np.any(too_many - fit > 1):
            middle = (fit + too_many) // 2
            is_too_much = is_over(np.maximum(middle, 1))
            is_open = too_many - fit > 1
            too_many = np.where(is_open & is_too_much, middle, too_many)
            fit = np.where(is_open & ~is_too_much, middle, fit)
        return fit

    def longest_row_that_fits(self, cap_bytes: int, *, rows: int = 1, up_to: int = _LONGEST_TOKENS) -> int:
        """Return the tokens of the longest row that fits, as do all shorter ones; 0: none does.

        rows: of this length, together. up_to: where the search ends.
        """
        start, stop = 1, min(4096, up_to)
        while start <= up_to:
            lengths = np.arange(start, stop + 1)
            over = self.peak_bytes(rows, lengths) > cap_bytes
            if over.any():
                return int(lengths[over.argmax()]) - 1
            start, stop = stop + 1, min(2 * stop, up_to)
        return up_to

    def _turns(self, units: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Return ascending numbers of units [unit, …], from 1 to `most`, between which the peak is a straight line."""
        if most <= _FEW_ROWS:
            return np.broadcast_to(np.arange(1, most + 1), (len(units), most))
        per_unit = self.peak.kinks / units[:, None]
        ones = np.ones((len(units), 1))
        turns = np.concatenate([ones, np.floor(per_unit), np.ceil(per_unit), ones * most], axis=1)
        return np.sort(np.clip(turns, 1, most).astype(np.int64), axis=1)

    def uncorrected(self, peak_bytes: int) -> int:
        """Return what these costs predicted, as it would be without their scale."""
        return self.static_bytes + round((peak_bytes - self.static_bytes) / self.scale)

    def beside(self, num_bytes: int) -> Costs:
        """Return the costs beside so many more bytes, such as an optimizer's state."""
        return replace(self, peak=self.peak.plus(num_bytes), static_bytes=self.static_bytes + num_bytes)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Costs:
        """Read back from JSON what `asdict` gave."""
        return cls(**{**saved, **{name: Surface.from_dict(saved[name]) for name in ("peak", "time")}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Interpolate values over padded tokens N = rows × T, sampled for some lengths T, along straight lines.

    For one T, what a transformer takes is a maximum of sums that are linear in N, so it is convex: the line between
    two samples is never below it. For one N it is linear in T (attention that keeps its scores: N·T) or flat. Beyond
    the last N the last line goes on; before the first, the line to `base`; beyond the lengths the outermost one holds.
    """

    base: float  # with no tokens at all
    lengths: tuple[int, ...]  # K ascending
    tokens: tuple[tuple[int, ...], ...]  # of each length, ascending: rows × length
    values: tuple[tuple[float, ...], ...]  # of each length, never falling

    def __call__(self, rows: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Return the value of micro-batches of `rows` rows of `length` tokens, padding included; shapes broadcast."""
        lengths = np.asarray(length, dtype=np.float64)
        num_tokens = np.asarray(rows, dtype=np.float64) * lengths
        lines = _lines(self)
        if len(lines) == 1:
            return lines[0](num_tokens)
        position = np.interp(lengths, self.lengths, np.arange(len(self.lengths)))
        position = np.broadcast_to(position, num_tokens.shape)
        below = np.minimum(position.astype(np.int64), len(self.lengths) - 2)
        values = np.empty(num_tokens.shape)
        for number in np.unique(below):
            here = below == number
            lower, upper = (line(num_tokens[here]) for line in lines[number : number + 2])
            values[here] = lower + (upper - lower) * (position[here] - number)
        return values

    def plus(self, value: float) -> Surface:
        """Return the surface with so much more everywhere."""
        values = tuple(tuple(each + value for each in line) for line in self.values)
        return replace(self, base=self.base + value, values=values)

    def toward(self, other: Surface, share: float) -> Surface:
        """Return the surface that lies this share of the way to another one, sampled wherever either is."""
        lengths = tuple(sorted({*self.lengths, *other.lengths}))
        tokens = np.union1d(self.kinks, other.kinks)
        lines = ([line(tokens / length, length) for length in lengths] for line in (self, other))
        values = ((1 - share) * here + share * there for here, there in zip(*lines, strict=True))
        return Surface(
            base=(1 - share) * self.base + share * other.base,
            lengths=lengths,
            tokens=(tuple(tokens.tolist()),) * len(lengths),
            values=tuple(tuple(np.maximum.accumulate(line).tolist()) for line in values),
        )

    @property
    def kinks(self) -> NDArray[np.int64]:
        """Return the padded tokens, ascending, at which a line may bend; between two of them all lines are straight."""
        return np.unique([number for line in self.tokens for number in line])

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Surface:
        """Read back from JSON what `asdict` gave."""
        lines = {name: tuple(map(tuple, saved[name])) for name in ("tokens", "values")}
        return cls(**{**saved, "lengths": tuple(saved["lengths"]), **lines})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Hold the samples of one length, from no tokens on."""

    tokens: NDArray[np.float64]
    values: NDArray[np.float64]

    def __call__(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        slope = (self.values[-1] - self.values[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(num_tokens - self.tokens[-1], 0) * slope
        return np.asarray(np.interp(num_tokens, self.tokens, self.values) + beyond)


@lru_cache(maxsize=64)
def _lines(surface: Surface) -> list[_Line]:
    """Return the lines as arrays; kept, since partitioning an effective batch takes a dozen calls."""
    return [
        _Line(tokens=np.array([0.0, *tokens]), values=np.array([surface.base, *values]))
        for tokens, values in zip(surface.tokens, surface.values, strict=True)
    ]
