"""The phases of a predicted timeline by name, and how a measurement's lie on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from brim.memory.prediction import Timeline

Mark = tuple[int, str]  # (point, what begins there)


def phases(timeline: Timeline) -> list[Mark]:
    """The marks, and between them the turn from forward to backward or from prefill to decode.

    Named as a measurement names them: "step 1: forward", "step 1: backward", "step 1: optimizer"; of a batch that is
    evaluated or generated for, "evaluate", "prefill" and "decode". A phase without points is left out.
    """
    ends = [point for point, _ in timeline.marks[1:]] + [len(timeline.places)]
    found: list[Mark] = []
    for (start, label), end in zip(timeline.marks, ends, strict=True):
        if end > start:
            found += _of_segment(timeline, start, end, label)
    return found


def aligned(num_points: int, marks: Sequence[Mark], timeline: Timeline) -> NDArray[np.float64]:
    """Where each measured point stands on the predicted axis: [num_points].

    marks: the measurement's. Phases of one name are laid on each other, the points between them evenly.
    """
    there = dict(_numbered(phases(timeline)))
    pairs = [(0, 0)]
    for key, point in _numbered(marks):
        if key in there and point > pairs[-1][0] and there[key] > pairs[-1][1]:
            pairs.append((point, there[key]))
    last = (num_points - 1, len(timeline.places) - 1)
    if last[0] > pairs[-1][0]:
        pairs.append(last)
    measured, predicted = zip(*pairs, strict=True)
    positions: NDArray[np.float64] = np.interp(np.arange(num_points), measured, predicted)
    return positions


def _of_segment(timeline: Timeline, start: int, end: int, label: str) -> list[Mark]:
    first = timeline.places[start].phase
    if ":" in label or first == "load":
        return [(start, label)]
    step = label.split(",")[0]
    prefix = f"{step}: " if step.startswith("step") else ""
    turn = next((point for point in range(start, end) if timeline.places[point].phase in ("backward", "decode")), None)
    found = [(start, prefix + first)]
    if turn is not None and turn > start:
        found.append((turn, prefix + timeline.places[turn].phase))
    return found


def _numbered(marks: Sequence[Mark]) -> list[tuple[tuple[str, int], int]]:
    """Each mark's name and how many of that name stand before it, with its point."""
    seen: Counter[str] = Counter()
    found = []
    for point, label in marks:
        found.append(((label, seen[label]), point))
        seen[label] += 1
    return found
