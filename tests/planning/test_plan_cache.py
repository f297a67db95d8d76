"""A plan is used again for the same work, and never for more memory than it was made for."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
from tests.planning.hand_made import MIB, hand_made_plan

from brim.config import DeviceFacts, load_config, resolve
from brim.planning.training_costs import PlanCache, plan_facts
from brim.storage import sealed

CPU = DeviceFacts(kind="cpu", bf16=False)
BASE = {"model_type": "llama", "hidden_size": 64}


def _facts(*, lengths=(3, 5, 8), base=BASE, adapter=None, **trainer):
    source = {
        "base_model": "m",
        "adapter": "lora",
        "trainer": {"type": "finetune", "effective_batch_size": 32, **trainer},
    }
    return plan_facts(resolve(load_config(source).config, CPU).config, base, lengths, adapter=adapter)


def _less(plan, num_bytes):
    return replace(plan.budget, limit_bytes=plan.budget.limit_bytes - num_bytes)


def test_a_plan_is_found_by_equal_work(tmp_path):
    plan = hand_made_plan()
    cache = PlanCache(tmp_path, _facts(), plan.budget)
    assert cache.read() is None
    cache.write(plan)
    again = PlanCache(tmp_path, _facts(learning_rate=0.5, eval_batch_size=9), plan.budget)
    assert again.read() == replace(plan, from_cache=True)
    again.write(again.read())
    assert cache.read() == replace(plan, from_cache=True)


@pytest.mark.parametrize(
    "other",
    [
        {"lengths": (3, 8, 5)},
        {"base": {**BASE, "hidden_size": 128}},
        {"adapter": {"r": 4}},
        {"effective_batch_size": 16},
        {"batch_size": 4},
        {"enable_gradient_checkpointing": True},
        {"optimizer": "sgd"},
        {"epochs": 2},
    ],
)
def test_other_work_has_another_plan(tmp_path, other):
    plan = hand_made_plan()
    PlanCache(tmp_path, _facts(), plan.budget).write(plan)
    assert PlanCache(tmp_path, _facts(**other), plan.budget).read() is None


def test_another_device_has_another_plan(tmp_path):
    plan = hand_made_plan()
    PlanCache(tmp_path, _facts(), plan.budget).write(plan)
    assert PlanCache(tmp_path, _facts(), replace(plan.budget, device="l4")).read() is None


def test_a_little_more_memory_changes_nothing_and_a_little_less_plans_anew(tmp_path):
    plan = hand_made_plan()
    PlanCache(tmp_path, _facts(), plan.budget).write(plan)
    more, less = _less(plan, -MIB), _less(plan, MIB)
    found = PlanCache(tmp_path, _facts(), more).read()
    assert found is not None
    assert found.budget == more
    assert PlanCache(tmp_path, _facts(), less).read() is None
    PlanCache(tmp_path, _facts(), less).write(replace(plan, budget=less))
    assert PlanCache(tmp_path, _facts(), more).read() is not None  # the same file
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_a_budget_of_nothing_has_a_place_too(tmp_path):
    plan = hand_made_plan()
    nothing = replace(plan.budget, limit_bytes=0)
    cache = PlanCache(tmp_path, _facts(), nothing)
    cache.write(replace(plan, budget=nothing))
    assert cache.read() is not None


def _ample(plan):
    """The first way, cut as if there were no limit."""
    chosen = replace(plan.chosen, cap_binds=False)
    return replace(plan, chosen=chosen, candidates=(chosen,))


def test_a_plan_that_no_limit_cuts_is_used_under_any_budget_that_it_fits(tmp_path):
    plan = _ample(hand_made_plan())
    PlanCache(tmp_path, _facts(), plan.budget).write(plan)
    spare_bytes = plan.budget.limit_bytes - plan.budget.margin_bytes - plan.chosen.total_bytes
    for less_bytes in (-40 * MIB * 1024, MIB, spare_bytes):
        budget = _less(plan, less_bytes)
        found = PlanCache(tmp_path, _facts(), budget).read()
        assert found is not None
        assert found.budget == budget
        assert found.chosen.cap_bytes == plan.chosen.cap_bytes - max(less_bytes, 0)
        assert found.candidates == (found.chosen,)
        assert replace(found.chosen, cap_bytes=plan.chosen.cap_bytes) == plan.chosen
    assert PlanCache(tmp_path, _facts(), _less(plan, spare_bytes + 1)).read() is None


def test_a_plan_for_which_others_were_too_large_is_not_used_under_a_larger_budget(tmp_path):
    plan = hand_made_plan()
    plan = replace(plan, chosen=replace(plan.chosen, cap_binds=False))
    PlanCache(tmp_path, _facts(), plan.budget).write(plan)
    assert PlanCache(tmp_path, _facts(), _less(plan, -1024 * MIB)).read() is None


def test_a_plan_that_was_measured_to_promise_too_much_is_not_used(tmp_path):
    plan = hand_made_plan()
    plan = replace(plan, costs=replace(plan.costs, scale=1.2))
    cache = PlanCache(tmp_path, _facts(), plan.budget)
    cache.write(plan)
    assert cache.read(scale=0.7) is not None  # it runs as it did
    assert cache.read(scale=1.21) is not None  # within 1%
    assert cache.read(scale=1.22) is None


@pytest.mark.parametrize("content", ["[]", "{}", '{"chosen": 3}', "3"])
def test_what_is_no_plan_is_said(tmp_path, content):
    plan = hand_made_plan()
    cache = PlanCache(tmp_path, _facts(), plan.budget)
    cache.write(plan)
    (path,) = (tmp_path / "plans").iterdir()
    path.write_text(sealed(content))
    assert cache.read() is None
    assert cache.note == f"{path} is damaged, and is not used"


def test_brim_that_is_not_installed_plans_all_the_same(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _facts()["versions"]["release"] == "0+unknown"
