"""What the campaign of kills is made of; `make bench-schedules` runs it."""

from __future__ import annotations

import pytest
from benchmarks.schedule_killed import Moment


@pytest.mark.parametrize(
    ("record", "places"),
    [
        ({"split": "train", "num_samples": 8}, ["step"]),
        ({"split": "train", "num_samples": 56}, ["step", "epoch"]),
        ({"split": "validation"}, ["evaluation"]),
        ({"event": "schedule"}, ["switch"]),
        ({"event": "point", "num_samples": 28}, ["point"]),
        ({"event": "checkpoint"}, ["checkpoint"]),
        ({"split": "test"}, []),
    ],
)
def test_places_are_told_by_the_lines_of_the_log(record, places):
    assert list(Moment.places_of(record)) == places
