"""The ways to look for the largest batch size that fits.

Each tries sizes until it knows enough; the answer is the largest of them that fitted. With M the largest size allowed:

    way       probes at most                        runs out of memory
    halving   1 + log2(start)                       at each size but the last
    doubling  2 + log2(M), and below start halving  once
    binary    2 + log2(M)                           at about half of its probes
    linear    3 where the peaks are on a line       not where they are
    predict   1 where the prediction is right       not where it is

Where the line or the prediction misleads, sizes are halved until one fits, and doubled or corrected from there: at most
2 · log2(M) + MOST_CORRECTIONS probes more.
"""

from __future__ import annotations

from math import ceil, isqrt

from brim.batching.correction import Curve, larger_size, smaller_size
from brim.batching.trials import Trials

WORTH_A_PROBE = 1.02  # a size that is larger by less is not looked for
_MOST_DOWN = 2  # peaks over the limit that are believed before sizes are halved
MOST_CORRECTIONS = 5  # of the factor 2 between a size that failed and its half, five geometric means leave 2%


def halving(trials: Trials, start: int) -> None:
    """Half the size until it fits."""
    size = trials.ladder.at_most(start)
    while not trials.try_size(size) and size > 1:
        size = trials.ladder.at_most(size // 2)


def doubling(trials: Trials, start: int) -> None:
    """Twice the size until it does not fit; where the first one does not, half of it until it does."""
    ladder = trials.ladder
    size = ladder.at_most(start)
    if not trials.try_size(size):
        halving(trials, size // 2 or 1)
        return
    while (larger := ladder.at_most(2 * size)) > size and trials.try_size(larger):
        size = larger


def binary(trials: Trials, start: int | None) -> None:
    """The middle between a size that fits and one that does not, until they are neighbours."""
    low, high = 0, trials.ladder.beyond
    size = trials.ladder.between(low, high) if start is None else trials.ladder.at_most(start)
    while size is not None:
        low, high = (size, high) if trials.try_size(size) else (low, size)
        size = trials.ladder.between(low, high)


def linear(trials: Trials) -> None:
    """Sizes 1 and 2 are measured; the line through their peaks gives the answer, which is verified."""
    if trials.try_size(1) and trials.ladder.at_most(2) == 2:
        trials.try_size(2)
        correct(trials, Curve(None))


def predict(trials: Trials, predicted: int, curve: Curve) -> None:
    """The predicted size is verified, and corrected from what its probe measured."""
    trials.try_size(trials.ladder.at_most(predicted))
    correct(trials, curve)


def correct(trials: Trials, curve: Curve) -> None:
    """Smaller sizes until one fits, then larger ones while the measured peaks say that there is room."""
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
    """Nothing has fitted yet: what the peaks say of the sizes over the limit, else half of the smallest."""
    told = None
    if trials.aim_bytes is not None and len(trials.probes) <= _MOST_DOWN:
        told = smaller_size(trials.peaks, limit_bytes=trials.aim_bytes, curve=curve)
    half = trials.failed // 2
    return trials.ladder.at_most(half if told is None or told >= trials.failed else told)


def _above(trials: Trials, curve: Curve, step_back: float) -> int | None:
    """A larger size that is worth a probe, smaller by a factor than one that failed; None: there is none."""
    fitted, failed, ladder = trials.fitted, trials.failed, trials.ladder
    if not fitted:
        return None
    told = None
    if trials.aim_bytes is not None:
        told = larger_size(trials.peaks, fitted, limit_bytes=trials.aim_bytes, curve=curve, most=ladder.most)
    if failed < ladder.beyond and (told is None or told >= failed):
        told = max(fitted + 1, isqrt(fitted * failed))  # the peaks do not tell of what it failed; from the safe side
    if told is None:
        return None
    size = ladder.at_most(min(told, ceil((failed - 1) / step_back)))
    return size if fitted * WORTH_A_PROBE <= size < failed else None
