"""Time shapes of a micro-batch on the device at hand, within a limit."""

from __future__ import annotations

from collections.abc import Callable

from brim.batching.surface import Surface
from brim.planning.time_fit import TimeSample
from brim.planning.time_shapes import CALLS, Timing


def time_shapes(
    timing: Timing, run: Callable[[int, int], None], clock: Callable[[], float], *, predicted: Surface
) -> tuple[TimeSample, ...]:
    """The shapes that could be timed before the time was up.

    run: forward and backward pass of (rows, tokens), which leaves no trace; what it raises is passed on. clock:
    seconds, once all that was asked of the device is done. predicted: seconds by the estimate; how far it was off so
    far tells whether the next shape can still be afforded.
    """
    started = clock()
    samples: list[TimeSample] = []
    for rows, length in timing.shapes:
        off = _off_by(samples, predicted)
        needed_s = CALLS * off * float(predicted(rows, length))
        if samples and clock() - started + needed_s > timing.allowed_s:
            continue  # a smaller one may come
        samples.append(TimeSample(rows=rows, length=length, seconds=_timed(run, clock, rows, length)))
        if clock() - started > timing.allowed_s:
            break
    return tuple(samples)


def _timed(run: Callable[[int, int], None], clock: Callable[[], float], rows: int, length: int) -> tuple[float, ...]:
    run(rows, length)
    seconds = []
    for _ in range(CALLS - 1):
        before = clock()
        run(rows, length)
        seconds.append(clock() - before)
    return tuple(seconds)


def _off_by(samples: list[TimeSample], predicted: Surface) -> float:
    """Measured over predicted, of the largest shape so far."""
    if not samples:
        return 1.0
    largest = max(samples, key=lambda sample: sample.num_tokens)
    return largest.median_s / max(float(predicted(largest.rows, largest.length)), 1e-9)
