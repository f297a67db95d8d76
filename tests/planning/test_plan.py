"""A plan is JSON and comes back."""

from __future__ import annotations

import json

import pytest
from tests.planning.hand_made import hand_made_plan, plan_that_adapts, plan_that_does_not_fit, plan_that_moves

from brim.planning import TrainingPlan


@pytest.mark.parametrize("plan", [hand_made_plan(), plan_that_does_not_fit(), plan_that_moves(), plan_that_adapts()])
def test_a_plan_comes_back_from_json(plan):
    assert TrainingPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_what_is_no_plan_is_refused():
    with pytest.raises(KeyError):
        TrainingPlan.from_dict({})
    with pytest.raises(TypeError):
        TrainingPlan.from_dict({**hand_made_plan().as_dict(), "budget": {"device": "t4"}})


def test_a_plan_from_before_batches_moved_is_read():
    saved = hand_made_plan().as_dict()
    for name in ("total_samples", "smallest_batch_size", "num_phases", "phases", "steps_between", "seconds_between"):
        del saved[name]
    for candidate in (saved["chosen"], *saved["candidates"]):
        del candidate["update_s"]
    assert TrainingPlan.from_dict(json.loads(json.dumps(saved))) == hand_made_plan()


def test_a_batch_moves_where_its_sizes_differ():
    assert plan_that_moves().batch_moves
    assert plan_that_adapts().batch_moves
    assert not hand_made_plan().batch_moves
    assert not hand_made_plan(smallest_batch_size=32).batch_moves


def test_the_least_seconds_are_known_where_the_batch_is_measured():
    assert hand_made_plan().least_seconds == 360.0
    assert plan_that_adapts().least_seconds == 360.0
    assert plan_that_does_not_fit().least_seconds == 0.0
