"""From what was recorded in time to a timeline with its marks and spikes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from brim.memory.events import Place
from brim.memory.measure.result import MeasuredTimeline, Spike


def timeline(
    times_ns: NDArray[np.int64],
    live_bytes: NDArray[np.int64],
    *,
    reserved_bytes: NDArray[np.int64] | None,
    marks: Sequence[tuple[int, str]],
    place_at: Callable[[int], Place],
) -> MeasuredTimeline:
    """Points in the order of their times; a mark stands at the first point of its time or later.

    marks: (time in ns, what begins). place_at: where the work was at a time in ns.
    """
    order = np.argsort(times_ns, kind="stable")
    times_ns, live_bytes = times_ns[order], live_bytes[order]
    placed = [(int(np.searchsorted(times_ns, time_ns)), label) for time_ns, label in marks]
    placed = [(point, label) for point, label in placed if point < len(times_ns)]
    return MeasuredTimeline(
        seconds=(times_ns - times_ns[:1]) / 1e9,
        live_bytes=live_bytes,
        reserved_bytes=None if reserved_bytes is None else reserved_bytes[order],
        marks=tuple(placed),
        spikes=tuple(_spikes(times_ns, live_bytes, [point for point, _ in placed], place_at)),
    )


def _spikes(
    times_ns: NDArray[np.int64], live_bytes: NDArray[np.int64], starts: Sequence[int], place_at: Callable[[int], Place]
) -> list[Spike]:
    """The first highest point of each part that has points."""
    found = []
    for start, end in zip(starts, [*starts[1:], len(live_bytes)], strict=False):
        if start < end:
            point = start + int(np.argmax(live_bytes[start:end]))
            found.append(Spike(point=point, live_bytes=int(live_bytes[point]), place=place_at(int(times_ns[point]))))
    return found
