"""The short form of the campaign of kills, and what it is made of."""

from __future__ import annotations

import pytest
from benchmarks.schedule_killed import Moment
from benchmarks.schedule_kills import campaigns


def test_killed_runs_whose_batch_follows_the_noise_go_on_to_the_bit():
    (campaign,) = campaigns(["noise scale"], num_kills=2, seed=2, say=lambda line: None)
    assert campaign.differences == []
    assert campaign.num_equal == campaign.num_runs >= 1
    assert campaign.num_kills == sum(campaign.by_place.values()) == 2
    assert campaign.num_switches >= 2, "the batch moves"


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
