"""Find the largest batch size that fits, by trying as few as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, TypeAlias, get_args

from brim.batching.correction import Curve, curve_of
from brim.batching.ladder import Ladder
from brim.batching.probe import Fits, Outcome, Probe
from brim.batching.searches import binary, doubling, halving, linear, predict
from brim.batching.trials import Trials
from brim.errors import InputError, NothingFitsError, Problem
from brim.units import format_bytes

__all__ = ["Fits", "Found", "Outcome", "Probe", "Search", "find_batch_size"]

Search: TypeAlias = Literal["predict", "linear", "binary", "doubling", "halving"]
Predicted: TypeAlias = int | Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search. The size was executed, and fitted: its probe is among the probes."""

    size: int
    probes: tuple[Probe, ...]  # in the order in which they were made
    reason: str

    def __repr__(self) -> str:
        tried = ", ".join(f"{probe.size:,} {probe.outcome.replace('_', ' ')}" for probe in self.probes)
        return f"Found: {self.size:,} ({self.reason})\n  tried: {tried}"

    @property
    def num_out_of_memory(self) -> int:
        """How many of the probes ran out of memory."""
        return sum(probe.outcome == "out_of_memory" for probe in self.probes)

    def num_chunks(self, effective_batch_size: int) -> int:
        """How many batches of at most this size make up an effective batch, so that it stays what it is."""
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
    """The largest size that was found to fit; it has been executed.

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
    _require_sound(how, most, start)
    ladder = Ladder(most=most, power_of_two=power_of_two)
    trials = Trials(fits, ladder, limit_bytes=limit_bytes, margin_bytes=margin_bytes)
    told = _search(trials, how, start=start, predicted=predicted, curve=curve_of(bytes_of))
    if not trials.fitted:
        raise NothingFitsError(_nothing_fits(trials, helps))
    return Found(size=trials.fitted, probes=tuple(trials.probes), reason=f"{told}; {_outcome(trials)}")


def _search(trials: Trials, how: Search, *, start: int | None, predicted: Predicted | None, curve: Curve) -> str:
    """Fill the trials; what was done."""
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
    told = f"predicted {predicted}"
    if not trials.peaks:
        return f"{told}; peaks are not measured, so whether more would fit is not known"
    if trials.limit_bytes is None:
        return f"{told}; there is no limit in bytes, so whether more would fit is not known"
    return f"{told}, corrected by the measured peaks" if len(trials.probes) > 1 else told


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


def _require_sound(how: Search, most: int, start: int | None) -> None:
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
