"""Choose which shapes of a micro-batch are traced, and put the surface of peak bytes through them.

A trace costs about a second, so there are few. They lie on lines of one length, where the peak is convex in the
padded tokens N, so that a straight line between two samples is never below it. The exception is the loss in chunks:
up to one full chunk its logits grow with N, and from there on they do not. That place is sampled by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Surface

LEAST_TOKENS = 2  # one to predict the other from


_LENGTH_STEP = 64  # lengths are rounded up to it, so that other data of the same kind meets the same samples


_SHORT_PERCENT = 10  # of the rows are no longer than what is taken for short


_BELOW, _ABOVE = 0.005, 0.02  # of a peak: a surface that is off by less is not given another line


_STRAIGHT = 0.02  # of a slope: samples whose slopes differ by less lie on one straight piece


_MOST_STEPS = 5  # along a line; each is a trace


_FAR_APART = 4.0  # lengths of which one is so many times the other have a line between them, if it is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Hold a shape that was traced."""

    rows: int
    tokens: int  # of each row
    peak_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bound the shapes that a plan may ask for."""

    longest: int  # tokens of a row
    short: int  # tokens of the shortest rows that matter
    most_rows: int  # of a micro-batch
    cap_bytes: int
    chunk_positions: int  # of a full chunk of the loss; 0: all logits stand at once


def region(lengths: ArrayLike, *, most_rows: int, cap_bytes: int, context: int | None, chunk_positions: int) -> Region:
    """Return the region of rows of these lengths. context: tokens that the model takes at most."""
    tokens = np.asarray(lengths, dtype=np.int64)
    rounded = sampled_length(tokens, context=context)
    # Where not even all rows together have the tokens of the longest one, they fit if it does.
    short = max(short_length(tokens), -(-rounded // most_rows))
    return Region(
        longest=rounded,
        short=min(round_length(short), rounded),
        most_rows=most_rows,
        cap_bytes=cap_bytes,
        chunk_positions=chunk_positions,
    )


def sampled_length(lengths: NDArray[np.int64], *, context: int | None) -> int:
    """Return the length of the longest samples: that of the longest row, rounded up within the context."""
    longest = max(int(lengths.max()), LEAST_TOKENS)
    rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    return rounded if context is None else max(min(rounded, context), longest)


def short_length(lengths: NDArray[np.int64]) -> int:
    """Return the length of the short rows that matter."""
    return int(np.percentile(lengths, _SHORT_PERCENT, method="inverted_cdf"))


def round_length(tokens: int) -> int:
    """Return the next of 64, 96, 128, 192, 256, 384, …"""
    return _LENGTH_STEP if tokens <= _LENGTH_STEP else _round(tokens, halves=_LENGTH_STEP)


def round_rows(rows: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    return _round(rows, halves=2)


def sampled(peak: Callable[[int, int], int], where: Region) -> Surface:
    """Return the peak over the region. peak: bytes of (rows, tokens), which is what costs time."""
    peaks = _Peaks(peak, where)
    longest = peaks.line(peaks.sample(1, where.longest), most_rows=where.most_rows)
    alone = peaks.surface([longest])
    last = longest[-1]
    if where.short == where.longest or (last.rows == where.most_rows and last.peak_bytes <= where.cap_bytes):
        return alone
    rows = min(where.most_rows, max(peaks.tokens_at_cap(longest) // where.short, 1))
    short = peaks.sample(rows, where.short)
    if _is_alike(short, alone):  # attention that keeps no scores: the length does not matter
        return through(alone, short.num_tokens, short.tokens, short.peak_bytes)
    # Rows of lengths between the two reach more tokens than as many of the shortest.
    most_tokens = where.most_rows * where.longest
    lines = [peaks.line(short, most_rows=-(-most_tokens // where.short)), longest]
    middle = round_length(round(math.sqrt(where.short * where.longest)))
    if where.longest >= _FAR_APART * where.short:
        both = peaks.surface(lines)
        between = peaks.sample(_most_rows_at(both, middle, where), middle)
        if _is_alike(between, both):
            return through(both, between.num_tokens, between.tokens, between.peak_bytes)
        lines.insert(1, peaks.line(between, most_rows=-(-most_tokens // middle)))
    return peaks.surface(lines)


def through(surface: Surface, number: int, length: int, value: int) -> Surface:
    """Return the surface with a line of this length that has this value at N = number.

    Where it is above the surface, the line rises in proportion to N; where it is below, no smaller N takes more.
    """
    numbers = np.array(sorted({each for line in surface.tokens for each in line} | {number}), dtype=np.float64)
    values = surface(numbers / length, length)
    missing = value - float(surface(number / length, length))
    if missing > 0:
        values = values + missing * numbers / number
    else:
        values = np.where(numbers <= number, np.minimum(values, value), values)
    lines = {
        each: (tokens, line) for each, tokens, line in zip(surface.lengths, surface.tokens, surface.values, strict=True)
    }
    lines[length] = tuple(int(each) for each in numbers), tuple(values.tolist())
    lengths = tuple(sorted(lines))
    return Surface(
        base=min(surface.base, float(value)),
        lengths=lengths,
        tokens=tuple(lines[each][0] for each in lengths),
        values=tuple(lines[each][1] for each in lengths),
    )


class _Peaks:
    """Trace shapes as they are asked for, each once."""

    def __init__(self, peak: Callable[[int, int], int], where: Region) -> None:
        self._peak, self._where = peak, where
        self._seen: dict[tuple[int, int], Sample] = {}
        self._base = self.sample(1, LEAST_TOKENS).peak_bytes
        self._chunk = where.chunk_positions
        # One row of one full chunk: where all rows are longer, their lines have no sample there.
        self._kink = self.sample(1, self._chunk + 1) if 1 < self._chunk < where.longest - 1 else None

    def sample(self, rows: int, tokens: int) -> Sample:
        if (rows, tokens) not in self._seen:
            self._seen[rows, tokens] = Sample(rows=rows, tokens=tokens, peak_bytes=self._peak(rows, tokens))
        return self._seen[rows, tokens]

    def line(self, first: Sample, *, most_rows: int) -> list[Sample]:
        """Return samples of one length, up to where they cross the cap or there are no more rows."""
        cap_bytes, tokens = self._where.cap_bytes, first.tokens
        line = [first]
        full_rows = self._chunk_rows(tokens)
        if first.rows != full_rows and 1 < full_rows < most_rows:
            line = sorted([first, self.sample(full_rows, tokens)], key=lambda sample: sample.rows)
        for _ in range(_MOST_STEPS):
            last = line[-1]
            if last.peak_bytes > cap_bytes or last.rows >= most_rows:
                break
            rows = max(round_rows(-(-self.tokens_at_cap(line) // tokens)), last.rows + 1)
            line.append(self.sample(min(rows, most_rows), tokens))
        return self._refined(line)

    def tokens_at_cap(self, line: Sequence[Sample]) -> int:
        """Return where the line's last straight piece that begins under the cap meets it; far away if it never does."""
        points = self._points(line)
        under = [number for number, (_, value) in enumerate(points) if value <= self._where.cap_bytes]
        if not under:
            return 0
        start = min(under[-1], len(points) - 2)
        (left, low), (right, high) = points[start : start + 2]
        slope = (high - low) / (right - left)
        most = self._where.most_rows * self._where.longest
        return most if slope <= 0 else min(int(left + (self._where.cap_bytes - low) / slope), most)

    def surface(self, lines: Sequence[Sequence[Sample]]) -> Surface:
        """Return the surface through lines in the order of their lengths."""
        below: list[tuple[int, float]] = []
        tokens: list[tuple[int, ...]] = []
        values: list[tuple[float, ...]] = []
        for line in lines:
            points = self._bent(line)
            below = _filled(points, below, first=line[0]) if tokens else points
            tokens.append(tuple(num_tokens for num_tokens, _ in below[1:]))
            values.append(tuple(np.maximum.accumulate([value for _, value in below[1:]]).tolist()))
        return Surface(
            base=float(self._base),
            lengths=tuple(line[0].tokens for line in lines),
            tokens=tuple(tokens),
            values=tuple(values),
        )

    def _points(self, line: Sequence[Sample]) -> list[tuple[int, float]]:
        """Return (N, peak) from no tokens on."""
        points = [(0, float(self._base))]
        if self._kink is not None and self._kink.tokens < line[0].tokens:
            points.append((self._kink.tokens, float(self._kink.peak_bytes)))
        return points + [(sample.num_tokens, float(sample.peak_bytes)) for sample in line]

    def _bent(self, line: Sequence[Sample]) -> list[tuple[int, float]]:
        """Return the points, with the place where a chunk is just full, as if the sample with a row more were there.

        Where that sample is the last, the line goes on from it as it came to it.
        """
        points = self._points(line)
        full = [sample for sample in line if 1 < sample.rows == self._chunk_rows(sample.tokens)]
        if not full:
            return points
        bent = sorted([*points, (self._chunk + 1, float(full[0].peak_bytes))])
        if full[0] == line[-1]:
            (left, low), (right, high) = points[-2:]
            bent.append((2 * right, high + (high - low) / (right - left) * right))
        return bent

    def _chunk_rows(self, tokens: int) -> int:
        """Return the fewest rows of this length that fill a chunk of the loss."""
        return -(-self._chunk // (tokens - 1))

    def _refined(self, line: list[Sample]) -> list[Sample]:
        """Return the line with a sample at the cap, where it bends on the piece that crosses it."""
        if len(line) < 2 or not line[-2].peak_bytes <= self._where.cap_bytes < line[-1].peak_bytes:
            return line
        before, left, right = self._points(line)[-3:]
        slopes = ((left[1] - before[1]) / (left[0] - before[0]), (right[1] - left[1]) / (right[0] - left[0]))
        rows = self.tokens_at_cap(line) // line[0].tokens
        if abs(slopes[1] - slopes[0]) <= _STRAIGHT * slopes[1] or not line[-2].rows < rows < line[-1].rows:
            return line
        return [*line[:-1], self.sample(rows, line[0].tokens), line[-1]]


def _round(number: int, *, halves: int) -> int:
    """Return the next power of two, or one and a half of one where that is at least 3/2 × `halves`."""
    power = 1 << max(number - 1, 0).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if power >= 2 * halves and number <= three_quarters else power


def _filled(
    line: Sequence[tuple[int, float]], shorter: Sequence[tuple[int, float]], *, first: Sample
) -> list[tuple[int, float]]:
    """Return the line's points, and before its first sample those of shorter rows, raised in proportion to N.

    A row of T tokens has none of fewer than T. Rows of lengths between the two lines do, and what depends on the
    length, attention's scores, grows with N · T.
    """
    tokens, values = zip(*shorter, strict=True)
    missing = max(first.peak_bytes - _along(tokens, values, first.num_tokens), 0.0)
    before = {
        num_tokens: value + missing * num_tokens / first.num_tokens
        for num_tokens, value in shorter
        if num_tokens < first.num_tokens
    }
    return sorted({**before, **{number: value for number, value in line if number or not before}}.items())


def _along(tokens: Sequence[int], values: Sequence[float], num_tokens: int) -> float:
    if num_tokens <= tokens[-1]:
        return float(np.interp(num_tokens, tokens, values))
    slope = (values[-1] - values[-2]) / (tokens[-1] - tokens[-2])
    return values[-1] + slope * (num_tokens - tokens[-1])


def _is_alike(sample: Sample, surface: Surface) -> bool:
    share = float(surface(sample.rows, sample.tokens)) / sample.peak_bytes - 1
    return -_BELOW <= share <= _ABOVE


def _most_rows_at(surface: Surface, tokens: int, where: Region) -> int:
    """Return the rows of this length that fit under the cap; 1 where none does."""
    rows = np.arange(1, where.most_rows + 1)
    return max(int(np.count_nonzero(surface(rows, tokens) <= where.cap_bytes)), 1)


Shape = tuple[int, int]  # rows, tokens
