"""Marks and spikes of what was recorded in time."""

from __future__ import annotations

import numpy as np

from brim.memory.trace import Place
from brim.workflows.measure.messages import Spike, timeline


def test_each_part_has_its_first_highest_point():
    found = timeline(
        np.asarray([1_000, 3_000, 2_000, 4_000, 5_000]),
        np.asarray([10, 30, 20, 30, 5]),
        reserved_bytes=np.asarray([100, 300, 200, 400, 500]),
        marks=[(1_000, "step 1: forward"), (3_500, "step 1: backward"), (9_000, "after the end")],
        place_at=lambda time_ns: Place("forward", operator=str(time_ns)),
    )
    assert found.live_bytes.tolist() == [10, 20, 30, 30, 5]
    assert found.reserved_bytes is not None
    assert found.reserved_bytes.tolist() == [100, 200, 300, 400, 500]
    assert found.seconds.tolist() == [0, 1e-6, 2e-6, 3e-6, 4e-6]
    assert found.marks == ((0, "step 1: forward"), (3, "step 1: backward"))
    assert found.spikes == (
        Spike(point=2, live_bytes=30, place=Place("forward", operator="3000")),
        Spike(point=3, live_bytes=30, place=Place("forward", operator="4000")),
    )


def test_nothing_recorded_has_no_points():
    nothing = np.zeros(0, dtype=np.int64)
    found = timeline(nothing, nothing, reserved_bytes=None, marks=[(1, "load")], place_at=lambda time_ns: Place("load"))
    assert (len(found.seconds), found.marks, found.spikes) == (0, (), ())
