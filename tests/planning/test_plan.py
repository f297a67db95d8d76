"""A plan is JSON and comes back."""

from __future__ import annotations

import json

import pytest
from tests.planning.hand_made import hand_made_plan, plan_that_does_not_fit

from brim.planning.plan import TrainingPlan


@pytest.mark.parametrize("plan", [hand_made_plan(), plan_that_does_not_fit()])
def test_a_plan_comes_back_from_json(plan):
    assert TrainingPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_what_is_no_plan_is_refused():
    with pytest.raises(KeyError):
        TrainingPlan.from_dict({})
    with pytest.raises(TypeError):
        TrainingPlan.from_dict({**hand_made_plan().as_dict(), "budget": {"device": "t4"}})
