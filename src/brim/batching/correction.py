"""What measured peaks say of the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

Measured: TypeAlias = tuple[int, int]  # a size, and the bytes at its peak


@dataclass(frozen=True, slots=True)
class Curve:
    """How peaks grow with the size: by the predicted bytes, or on a line where nothing is predicted."""

    bytes_of: Callable[[int], float] | None

    def __call__(self, size: int) -> float:
        return float(size) if self.bytes_of is None else self.bytes_of(size)

    def largest(self, limit: float, most: int) -> int:
        """The largest size up to `most` at or below the limit of this curve, which does not fall; 0: none is."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle) <= limit else (low, middle)
        return low


def curve_of(bytes_of: Callable[[int], float] | None) -> Curve:
    """A curve that asks for each size once."""
    return Curve(None if bytes_of is None else cache(bytes_of))


def larger_size(peaks: Sequence[Measured], fitted: int, *, limit_bytes: int, curve: Curve, most: int) -> int | None:
    """The largest size that should fit, seen from the largest that did; None: its peak was not measured.

    peaks: of all sizes that were measured, ascending. Through two of them the peaks go on along the curve. With one
    alone, what the shape adds may be off by a factor, or the whole by a constant: the one that leaves less room counts.
    """
    here = next((point for point in peaks if point[0] == fitted), None)
    if here is None:
        return None
    other = _beside(peaks, here)
    slope = None if other is None else _slope(here, other, curve)
    if slope is None and other is not None and curve.bytes_of is None:
        return min(2 * fitted, most)  # a peak that does not grow says nothing of where it begins to
    if slope is None:
        slope = _steepest(here, curve)
    return curve.largest(curve(fitted) + (limit_bytes - here[1]) / slope, most)


def smaller_size(peaks: Sequence[Measured], *, limit_bytes: int, curve: Curve) -> int | None:
    """The largest size that should fit, where all that were measured are over the limit; None: nothing tells.

    As for a larger size; with one peak alone, the error is whichever leaves the peak larger at the smaller size.
    """
    if not peaks:
        return None
    here = peaks[0]
    slope = _slope(here, peaks[1], curve) if len(peaks) > 1 else _flattest(here, curve)
    if slope is None:
        return None
    return curve.largest(curve(here[0]) + (limit_bytes - here[1]) / slope, here[0] - 1) or None


def _beside(peaks: Sequence[Measured], here: Measured) -> Measured | None:
    """The next larger measured size, or the next smaller one."""
    at = peaks.index(here)
    if at + 1 < len(peaks):
        return peaks[at + 1]
    return peaks[at - 1] if at else None


def _slope(one: Measured, other: Measured, curve: Curve) -> float | None:
    """Measured bytes for each of the curve; None where they do not grow."""
    run, rise = curve(one[0]) - curve(other[0]), one[1] - other[1]
    return rise / run if run and rise / run > 0 else None


def _steepest(here: Measured, curve: Curve) -> float:
    if curve.bytes_of is None:
        return max(here[1], 1) / here[0]  # as if there were no bytes but those that the rows add
    return max(1.0, _factor(here, curve))


def _flattest(here: Measured, curve: Curve) -> float | None:
    factor = 0.0 if curve.bytes_of is None else _factor(here, curve)
    return min(1.0, factor) if factor > 0 else None


def _factor(here: Measured, curve: Curve) -> float:
    """Measured over predicted of what the shape adds, if what is there without rows is as predicted."""
    without_rows = 2 * curve(1) - curve(2)
    added = curve(here[0]) - without_rows
    return (here[1] - without_rows) / added if added > 0 else 1.0
