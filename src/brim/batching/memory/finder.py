"""Find the largest batch size that fits, trying as few sizes as possible.

Each search tries sizes until it knows enough; the answer is the largest size that fitted. With M the largest size
allowed:

    search    probes at most                        runs out of memory
    halving   1 + log2(start)                       at each size but the last
    doubling  2 + log2(M), and below start halving  once
    binary    2 + log2(M)                           at about half of its probes
    linear    3 where the peaks are on a line       never where they are
    predict   1 where the prediction is right       never where it is

Where the line or the prediction misleads, sizes are halved until one fits, and doubled or corrected from there: at
most 2 · log2(M) + MOST_CORRECTIONS probes more. The sizes that may be tried are all up to M, or the powers of two
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral
from typing import Literal, TypeAlias, get_args

from brim.errors import InputError, NothingFitsError, ProbeError, Problem
from brim.units import format_bytes

Search: TypeAlias = Literal["predict", "linear", "binary", "doubling", "halving"]


Predicted: TypeAlias = int | Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold the answer of a search. The size was executed, and fitted: its probe is among the probes."""

    size: int
    probes: tuple[Probe, ...]  # in the order in which they were made
    reason: str

    def __repr__(self) -> str:
        tried = ", ".join(f"{probe.size:,} {probe.outcome.replace('_', ' ')}" for probe in self.probes)
        return f"Found: {self.size:,} ({self.reason})\n  tried: {tried}"

    @property
    def num_out_of_memory(self) -> int:
        """Count the probes that ran out of memory."""
        return sum(probe.outcome == "out_of_memory" for probe in self.probes)

    def num_chunks(self, effective_batch_size: int) -> int:
        """Count the batches of at most this size that make up an effective batch."""
        return -(-effective_batch_size // self.size)


def find_batch_size(
    fits: Fits,
    *,
    how: Search = "predict",
    most: int,
    start: int | None = None,
    predicted: Predicted | None = None,
    bytes_of: Callable[[int], float] | None = None,
    limit_bytes: int | None = None,
    margin_bytes: int = 0,
    power_of_two: bool = False,
    helps: Sequence[str] = (),
) -> Found:
    """Return the largest size that was found to fit; it has been executed.

    fits: tries a size, and says what came of it; exceptions that it raises pass through.
    how: docs/finding-a-batch-size.md states how many probes each way takes.
    most: the largest size allowed, such as the rows there are.
    start: the first size of halving (else `most`), of doubling (else 1), of binary (else the middle).
    predicted: for predict: the size, or a function that works it out; else it follows of bytes_of and limit_bytes.
    bytes_of: for predict: the predicted peak of a size, by which the answer is corrected.
    limit_bytes: what peaks may reach; a probe whose peak is above it does not fit, whatever its outcome.
    margin_bytes: how far below the limit predictions and corrections aim; a peak in between fits.
    power_of_two: only powers of two, rounded down.
    helps: what would make a single row fit, each with its predicted peak, for the error.

    Raises NothingFitsError when size 1 does not fit, ProbeError for a probe that ran no step or another size, and
    InputError for arguments that make no sense.
    """
    _require_sound_search(how, most, start)
    ladder = Ladder(most=most, power_of_two=power_of_two)
    trials = Trials(fits, ladder, limit_bytes=limit_bytes, margin_bytes=margin_bytes)
    curve = Curve(None if bytes_of is None else cache(bytes_of))  # asks for each size once
    reason = _search(trials, how, start=start, predicted=predicted, curve=curve)
    if not trials.fitted:
        raise NothingFitsError(_nothing_fits(trials, helps))
    return Found(size=trials.fitted, probes=tuple(trials.probes), reason=f"{reason}; {_outcome(trials)}")


def _search(trials: Trials, how: Search, *, start: int | None, predicted: Predicted | None, curve: Curve) -> str:
    """Fill the trials; return what was done."""
    most = trials.ladder.most
    if how == "halving":
        halving(trials, most if start is None else start)
        return f"halved from {trials.probes[0].size}"
    if how == "doubling":
        doubling(trials, 1 if start is None else start)
        return f"doubled from {trials.probes[0].size}"
    if how == "binary":
        binary(trials, start)
        return f"binary search between 1 and {most}"
    if how == "linear":
        return _linear(trials)
    if predicted is None and curve.bytes_of is not None and trials.aim_bytes is not None:
        predicted = max(1, curve.largest(trials.aim_bytes, most))
    if predicted is None:
        return f"nothing was predicted, so {_linear(trials)}"
    return _predict(trials, predicted if isinstance(predicted, int) else predicted(), curve)


def _predict(trials: Trials, predicted: int, curve: Curve) -> str:
    predict(trials, predicted, curve)
    if not trials.peaks:
        return f"predicted {predicted}; peaks are not measured, so whether more would fit is not known"
    if trials.limit_bytes is None:
        return f"predicted {predicted}; there is no limit in bytes, so whether more would fit is not known"
    return f"predicted {predicted}" + ", corrected by the measured peaks" * (len(trials.probes) > 1)


def _linear(trials: Trials) -> str:
    if trials.limit_bytes is None:
        doubling(trials, 1)
        return "doubled from 1, since there is no limit in bytes to which a line of peaks could be drawn"
    linear(trials)
    if trials.fitted and not trials.peaks:
        doubling(trials, trials.fitted)
        return "doubled from 1, since peaks are not measured"
    return "along the line through the peaks of sizes 1 and 2"


def _outcome(trials: Trials) -> str:
    size = trials.fitted
    peak = next(probe.peak_bytes for probe in trials.probes if probe.size == size)
    used = "" if peak is None else f" with a peak of {format_bytes(peak)}"
    limit = "" if peak is None or trials.limit_bytes is None else f" of {format_bytes(trials.limit_bytes)}"
    num = len(trials.probes)
    return f"{size} ran and fitted{used}{limit}; {num} probe{'s' * (num > 1)}"


def _nothing_fits(trials: Trials, helps: Sequence[str]) -> Problem:
    probe = next(probe for probe in trials.probes if probe.size == 1)
    ran_out = probe.peak_bytes is None or trials.limit_bytes is None
    limit = "" if trials.limit_bytes is None else f", of {format_bytes(trials.limit_bytes)}"
    why = f"ran out of memory{limit}" if ran_out else f"took {format_bytes(probe.peak_bytes or 0)}{limit}"
    return Problem(
        what=f"not even one row fits: batch size 1 {why}",
        expected="a batch of one row that fits",
        fix="; or ".join(helps) or "enable activation checkpointing, shorten the rows, or use a smaller model",
    )


def _require_sound_search(how: Search, most: int, start: int | None) -> None:
    problems = []
    if how not in get_args(Search):
        problems.append(Problem(what=f"how is {how!r}", expected=f"one of {', '.join(get_args(Search))}"))
    if not _is_size(most):
        expected = "a whole number of at least 1"
        problems.append(Problem(what=f"most is {most!r}", expected=expected, fix="give the rows there are"))
    if start is not None and not _is_size(start):
        problems.append(Problem(what=f"start is {start!r}", expected="a whole number of at least 1"))
    if problems:
        raise InputError(*problems)


def _is_size(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


WORTH_A_PROBE = 1.02  # a size that is larger by less is not looked for


_MOST_DOWN = 2  # peaks over the limit that are believed before sizes are halved


MOST_CORRECTIONS = 5  # of the factor 2 between a size that failed and its half, five geometric means leave 2%


def halving(trials: Trials, start: int) -> None:
    """Halve the size until it fits."""
    size = trials.ladder.at_most(start)
    while not trials.try_size(size) and size > 1:
        size = trials.ladder.at_most(size // 2)


def doubling(trials: Trials, start: int) -> None:
    """Double the size until it does not fit; where the first one does not, halve it until it does."""
    ladder = trials.ladder
    size = ladder.at_most(start)
    if not trials.try_size(size):
        halving(trials, size // 2 or 1)
        return
    while (larger := ladder.at_most(2 * size)) > size and trials.try_size(larger):
        size = larger


def binary(trials: Trials, start: int | None) -> None:
    """Try the middle between a size that fits and one that does not, until they are neighbours."""
    low, high = 0, trials.ladder.beyond
    size = trials.ladder.between(low, high) if start is None else trials.ladder.at_most(start)
    while size is not None:
        low, high = (size, high) if trials.try_size(size) else (low, size)
        size = trials.ladder.between(low, high)


def linear(trials: Trials) -> None:
    """Measure sizes 1 and 2; the line through their peaks gives the answer, which is verified."""
    if trials.try_size(1) and trials.ladder.at_most(2) == 2:
        trials.try_size(2)
        correct(trials, Curve(None))


def predict(trials: Trials, predicted: int, curve: Curve) -> None:
    """Verify the predicted size, and correct it by what its probe measured."""
    trials.try_size(trials.ladder.at_most(predicted))
    correct(trials, curve)


def correct(trials: Trials, curve: Curve) -> None:
    """Try smaller sizes until one fits, then larger ones while the measured peaks say that they should."""
    while not trials.fitted and trials.failed > 1:
        trials.try_size(_below(trials, curve))
    num_corrections, step_back = 0, 1.0
    while num_corrections < MOST_CORRECTIONS and (size := _above(trials, curve, step_back)) is not None:
        has_doubled = size >= 2 * trials.fitted
        has_fitted = trials.try_size(size)
        num_corrections += not (has_fitted and has_doubled)
        if not has_fitted:
            step_back = 1 + max(2 * (step_back - 1), WORTH_A_PROBE - 1)  # peaks that mislead once may do so again


def _below(trials: Trials, curve: Curve) -> int:
    """Return the size to try after sizes over the limit: what their peaks suggest, else half of the smallest."""
    size = None
    if trials.aim_bytes is not None and len(trials.probes) <= _MOST_DOWN:
        size = smaller_size(trials.peaks, limit_bytes=trials.aim_bytes, curve=curve)
    return trials.ladder.at_most(trials.failed // 2 if size is None or size >= trials.failed else size)


def _above(trials: Trials, curve: Curve, step_back: float) -> int | None:
    """Return a larger size that is worth a probe, smaller by a factor than one that failed; None: there is none."""
    fitted, failed, ladder = trials.fitted, trials.failed, trials.ladder
    if not fitted:
        return None
    aim = trials.aim_bytes
    suggested = (
        None if aim is None else larger_size(trials.peaks, fitted, limit_bytes=aim, curve=curve, most=ladder.most)
    )
    if failed < ladder.beyond and (suggested is None or suggested >= failed):
        suggested = max(fitted + 1, math.isqrt(fitted * failed))  # the peaks do not explain it: from the safe side
    if suggested is None:
        return None
    size = ladder.at_most(min(suggested, math.ceil((failed - 1) / step_back)))
    return size if fitted * WORTH_A_PROBE <= size < failed else None


Measured: TypeAlias = tuple[int, int]  # a size, and the bytes at its peak


@dataclass(frozen=True, slots=True)
class Curve:
    """Say how peaks grow with the size: as predicted, or on a line where nothing is predicted."""

    bytes_of: Callable[[int], float] | None

    def __call__(self, size: int) -> float:
        return float(size) if self.bytes_of is None else self.bytes_of(size)

    def largest(self, limit: float, most: int) -> int:
        """Return the largest size up to `most` at or below the limit of this curve, which does not fall; 0: none is."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle) <= limit else (low, middle)
        return low


def larger_size(peaks: Sequence[Measured], fitted: int, *, limit_bytes: int, curve: Curve, most: int) -> int | None:
    """Return the largest size that should fit, seen from the largest that did; None: its peak was not measured.

    peaks: of all sizes that were measured, ascending. Through two of them the peaks go on along the curve. With one
    alone, what the shape adds may be off by a factor, or the whole by a constant: whichever allows fewer rows counts.
    """
    here = next((point for point in peaks if point[0] == fitted), None)
    if here is None:
        return None
    other = _beside(peaks, here)
    slope = None if other is None else _slope(here, other, curve)
    if slope is None and other is not None and curve.bytes_of is None:
        return min(2 * fitted, most)  # peaks that do not grow yet do not show where they begin to
    if slope is None:
        slope = _steepest(here, curve)
    return curve.largest(curve(fitted) + (limit_bytes - here[1]) / slope, most)


def smaller_size(peaks: Sequence[Measured], *, limit_bytes: int, curve: Curve) -> int | None:
    """Return the largest size that should fit, where all that were measured are over the limit; None: not known.

    It is found as a larger size is; with one peak alone, the error is whichever leaves the smaller size's peak larger.
    """
    if not peaks:
        return None
    here = peaks[0]
    slope = _slope(here, peaks[1], curve) if len(peaks) > 1 else _flattest(here, curve)
    if slope is None:
        return None
    return curve.largest(curve(here[0]) + (limit_bytes - here[1]) / slope, here[0] - 1) or None


def _beside(peaks: Sequence[Measured], here: Measured) -> Measured | None:
    """Return the next larger measured size, or the next smaller one."""
    at = peaks.index(here)
    if at + 1 < len(peaks):
        return peaks[at + 1]
    return peaks[at - 1] if at else None


def _slope(one: Measured, other: Measured, curve: Curve) -> float | None:
    """Return measured bytes for each byte of the curve; None where they do not grow."""
    run, rise = curve(one[0]) - curve(other[0]), one[1] - other[1]
    return rise / run if run and rise / run > 0 else None


def _steepest(here: Measured, curve: Curve) -> float:
    if curve.bytes_of is None:
        return max(here[1], 1) / here[0]  # as if all bytes came with the rows
    return max(1.0, _factor(here, curve))


def _flattest(here: Measured, curve: Curve) -> float | None:
    factor = 0.0 if curve.bytes_of is None else _factor(here, curve)
    return min(1.0, factor) if factor > 0 else None


def _factor(here: Measured, curve: Curve) -> float:
    """Return measured over predicted of what the shape adds, if what is there without rows is as predicted."""
    without_rows = 2 * curve(1) - curve(2)
    added = curve(here[0]) - without_rows
    return (here[1] - without_rows) / added if added > 0 else 1.0


class Trials:
    """Tries each size once, and keeps what came of it. A peak above the limit counts as a size that does not fit.

    limit_bytes: of peaks; None: only running out of memory counts. margin_bytes: the part of it that sizes not tried
    yet should leave free, since peaks vary.
    """

    def __init__(self, fits: Fits, ladder: Ladder, *, limit_bytes: int | None = None, margin_bytes: int = 0) -> None:
        self.ladder = ladder
        self.limit_bytes = limit_bytes
        self.aim_bytes = None if limit_bytes is None else limit_bytes - margin_bytes
        self.probes: list[Probe] = []
        self._fits = fits
        self._verdicts: dict[int, bool] = {}

    @property
    def fitted(self) -> int:
        """Return the largest size that was executed and fitted; 0: none yet."""
        return max((size for size, verdict in self._verdicts.items() if verdict), default=0)

    @property
    def failed(self) -> int:
        """Return the smallest size above `fitted` that failed; where none has, the first that may not be tried."""
        fitted = self.fitted
        above = (size for size, verdict in self._verdicts.items() if not verdict and size > fitted)
        return min(above, default=self.ladder.beyond)

    @property
    def peaks(self) -> list[tuple[int, int]]:
        """Return the sizes that ran to their end with their peaks, ascending, also those over the limit."""
        ended = [(probe.size, probe.peak_bytes) for probe in self.probes if probe.outcome == "fits"]
        return sorted((size, peak_bytes) for size, peak_bytes in ended if peak_bytes is not None)

    def try_size(self, size: int) -> bool:
        """Return whether it fits. Raises ProbeError for a probe that shows nothing."""
        if size not in self._verdicts:
            probe = self._fits(size)
            _require_sound_probe(probe, size)
            self.probes.append(probe)
            limit_bytes = math.inf if self.limit_bytes is None else self.limit_bytes
            self._verdicts[size] = probe.outcome == "fits" and (probe.peak_bytes or 0) <= limit_bytes
        return self._verdicts[size]


def _require_sound_probe(probe: Probe, size: int) -> None:
    if probe.size != size:
        what = f"a probe of batch size {size} ran batch size {probe.size}"
        raise ProbeError(what=what, fix="let the step take as many rows as it is asked for")
    if probe.outcome == "fits" and probe.steps < 1:
        what = f"the probe of batch size {size} says that it fits, and ran no step"
        fix = "let it run at least one step: a data loader of fewer rows than a batch yields none"
        raise ProbeError(what=what, expected="steps of at least 1", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Say which sizes may be tried: 1, 2, 3, … most; or 1, 2, 4, … up to it."""

    most: int
    power_of_two: bool = False

    def at_most(self, size: int) -> int:
        """Return the largest size that is not above `size`; the smallest one where there is none."""
        capped = max(1, min(size, self.most))
        return 1 << (capped.bit_length() - 1) if self.power_of_two else capped

    @property
    def beyond(self) -> int:
        """Return the first size that may not be tried."""
        return 2 * self.at_most(self.most) if self.power_of_two else self.most + 1

    def between(self, low: int, high: int) -> int | None:
        """Return the middle of the sizes above `low`, which may be 0, and below `high`; None where there is none."""
        if not self.power_of_two:
            return (low + high) // 2 if high - low > 1 else None
        first, last = low.bit_length(), high.bit_length() - 1  # exponents: above low's, below high's
        return 1 << ((first + last) // 2) if first < last else None


Outcome: TypeAlias = Literal["fits", "out_of_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Hold one size that was tried, and what came of it."""

    size: int
    steps: int  # that were run to their end; 0 with the outcome "fits" is a failure of the probe itself
    outcome: Outcome
    peak_bytes: int | None  # None: the device does not say, or the step did not end
    seconds: float

    def above(self, before_bytes: int | None, *, held_bytes: int) -> Probe:
        """Return the probe of a process whose peak was so high before, with its peak in bytes of tensors.

        held_bytes: of those that were there before.
        """
        if self.peak_bytes is None or before_bytes is None:
            return replace(self, peak_bytes=None)
        return replace(self, peak_bytes=self.peak_bytes - before_bytes + held_bytes)


Fits: TypeAlias = Callable[[int], Probe]
