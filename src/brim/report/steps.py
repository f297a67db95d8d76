"""A predicted timeline with more steps of training: those after the second are like the second."""

from __future__ import annotations

import re

import numpy as np

from brim.memory.prediction import Timeline

_STEP = re.compile(r"step (\d+)(.*)")


def with_steps(timeline: Timeline, num_steps: int) -> Timeline:
    """The timeline with its last step repeated until there are so many; the same where there are as many or none."""
    numbered = [(point, match) for point, label in timeline.marks if (match := _STEP.fullmatch(label))]
    if not numbered:
        return timeline
    last = int(numbered[-1][1][1])
    of_last = [(point, match[2]) for point, match in numbered if int(match[1]) == last]
    start, end = of_last[0][0], len(timeline.places)
    more = max(num_steps - last, 0)
    order = np.concatenate([np.arange(end), np.tile(np.arange(start, end), more)])
    reserved = timeline.reserved_bytes[order]
    reserved[end:] = np.maximum(reserved[end:], timeline.reserved_bytes[-1])  # what is held at the end stays held
    marks = [mark for mark in timeline.marks if mark[0] < end]
    for number in range(more):
        marks += [(point + (number + 1) * (end - start), f"step {last + number + 1}{rest}") for point, rest in of_last]
    return Timeline(
        live_bytes={category: live[order] for category, live in timeline.live_bytes.items()},
        reserved_bytes=reserved,
        marks=tuple(marks),
        places=timeline.places + timeline.places[start:] * more,
    )
