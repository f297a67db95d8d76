"""A plan for generation proven on the device: one try of the passes that take the most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import brim
from brim.batching import random_states
from brim.planning import settings_of
from brim.planning.costs.calibration import TELLING_BYTES
from brim.planning.generation import plan_job, request_of
from brim.planning.generation_launch import proven

LENGTHS = [20] * 10 + [10] * 30


@pytest.fixture(scope="module")
def at_hand(tiny_base):
    """A session, its model and the settings of generation."""
    model = brim.Model({"base_model": str(tiny_base), "generation": {"max_new_tokens": 6, "do_sample": True}})
    session, llm = model._open(), model._weights()
    return session, llm, settings_of(llm, session)


@pytest.fixture
def scarce(at_hand, monkeypatch, tmp_path):
    """A plan that takes all of the memory, the request for it, and what to prove it with."""
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path))
    session, llm, settings = at_hand
    request = request_of(session, LENGTHS, llm=llm)
    plan = plan_job(request, say=print)
    assert plan.source == "closed form"  # a job of some milliseconds is not worth a trace
    return replace(plan, total_bytes=plan.budget.limit_bytes), request, llm, settings


def test_where_less_than_half_of_the_memory_is_needed_nothing_is_tried(at_hand, monkeypatch):
    session, llm, settings = at_hand
    request = request_of(session, LENGTHS, llm=llm)
    monkeypatch.setattr("brim.planning.generation_launch.peak_passes", None)
    plan = proven(plan_job(request, say=print), request, llm, settings, say=print)
    assert plan.rows == 40
    assert plan.proof == "not tried before the first rows, since less than half of the memory is needed"


def test_the_first_rows_are_tried_once_and_leave_no_trace(scarce):
    plan, request, llm, settings = scarce
    before = random_states()
    found = proven(plan, request, llm, settings, say=print)
    assert found.rows == 40
    assert found.proof.startswith("40 rows × 25 tokens ran and fitted (1 probe")
    assert all(
        np.array_equal(one, other) if isinstance(one, np.ndarray) else True
        for one, other in zip(before, random_states(), strict=False)
    )
    again = proven(plan, request, llm, settings, say=print)
    assert again.proof == "not tried before the first rows, since as much has run before"


def test_where_they_run_out_of_memory_fewer_are_taken(scarce, monkeypatch):
    plan, request, llm, settings = scarce
    tried = []

    def run_out(passes, chooser, shape):
        tried.append(shape.rows)
        if shape.rows > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("brim.planning.generation_launch.peak_passes", run_out)
    said = []
    found = proven(plan, request, llm, settings, say=said.append)
    assert tried[:2] == [1, 40]  # libraries are warm before the first try
    assert tried[-1] == found.rows <= 10
    assert sorted(tried[1:], reverse=True) == tried[1:]
    assert said[0].startswith("40 rows × 25 tokens, 25 prompts in a pass, ran out of memory when they were tried: ")
    assert found.room().rows(25) == found.rows


def test_a_peak_above_the_prediction_is_known_from_then_on(scarce, monkeypatch):
    plan, request, llm, settings = scarce
    measured = plan.costs.static_bytes + 3 * TELLING_BYTES
    costs = replace(plan.costs, cell_bytes=2 * TELLING_BYTES / (40 * 25))
    plan = replace(plan, costs=costs, cap_bytes=measured - TELLING_BYTES // 2)
    monkeypatch.setattr(
        "brim.planning.generation_launch._Trial.probe",
        lambda trial, shape: a_probe(shape.rows, measured),
    )
    monkeypatch.setattr("brim.planning.generation_launch._with_what_is_left", lambda plan, request, say: plan)
    found = proven(plan, request, llm, settings, say=print)
    predicted = plan.uncorrected_bytes - costs.static_bytes
    assert found.costs.scale == pytest.approx(3 * TELLING_BYTES / predicted)
    assert found.rows < 40  # what was tried would fit, but for the prediction of all that may come
    assert request.calibrations.correction().scale == pytest.approx(found.costs.scale)


def a_probe(rows, peak_bytes):
    from brim.batching import Probe

    return Probe(size=rows, steps=1, outcome="fits", peak_bytes=peak_bytes, seconds=0.1)


def test_rows_that_were_given_are_not_tried_and_the_plan_says_what_it_would_take(at_hand):
    session, llm, settings = at_hand
    request = request_of(session, LENGTHS, llm=llm, fixed_rows=3)
    plan = proven(plan_job(request, say=print), request, llm, settings, say=print)
    assert plan.rows == 3
    assert plan.proof.endswith("since their number was given")


def planned(tiny_base, monkeypatch, *, reserved_bytes=None, **generation):
    """The plan of 40 prompts with transformers' `generate`."""
    model = brim.Model({"base_model": str(tiny_base), "generation": {"max_new_tokens": 6, **generation}})
    request = request_of(model._open(), LENGTHS, llm=model._weights())
    if reserved_bytes is not None:
        budget = plan_job(request, say=print).budget
        there = replace(budget, limit_bytes=budget.outside_bytes + reserved_bytes, margin_bytes=0)
        monkeypatch.setattr("brim.planning.generation.budget_of", lambda *args, **given: there)
    return plan_job(request, say=print)


BEAMS = {"num_beams": 4, "do_sample": False}


def test_with_room_for_all_beams_run_together_and_no_trace_is_made(tiny_base, monkeypatch):
    monkeypatch.setattr("brim.planning.generation.cache_model", None)
    plan = planned(tiny_base, monkeypatch, **BEAMS)
    assert (plan.engine, plan.source, plan.rows, plan.rows_reason) == ("static", "closed form", 40, "all rows together")


def test_with_less_memory_fewer_prompts_with_their_beams_run_together(tiny_base, monkeypatch):
    one = planned(tiny_base, monkeypatch, **BEAMS).costs
    a_row, weights = float(one.peak_bytes(1, 26)) - one.static_bytes, one.static_bytes
    for rows in (1, 3, 9):
        monkeypatch.undo()
        plan = planned(tiny_base, monkeypatch, reserved_bytes=round(weights + (rows + 0.5) * a_row), **BEAMS)
        assert (plan.rows, plan.memory_rows) == (rows, rows)
        assert plan.rows_reason == "as many as there is memory for"
        assert plan.fits
        assert plan.total_bytes <= plan.budget.limit_bytes
    fewer = planned(tiny_base, monkeypatch, reserved_bytes=round(weights + 9.5 * a_row), **(BEAMS | {"num_beams": 8}))
    assert 4 <= fewer.rows <= 5


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ({"num_beams": 2, "do_sample": True}, "beams that sample draw from one generator, so rows go one by one"),
        ({"prompt_lookup_num_tokens": 2, "do_sample": False}, "prompt lookup takes one row at a time"),
    ],
)
def test_where_rows_go_one_by_one_the_plan_says_so_and_why(tiny_base, monkeypatch, generation, reason):
    plan = planned(tiny_base, monkeypatch, **generation)
    assert (plan.rows, plan.rows_reason) == (1, reason)


def test_a_peak_above_the_budget_is_said(tiny_base, monkeypatch, tmp_path):
    class Meter:
        def begin(self):
            pass

        def peak_bytes(self):
            return 2**60

    monkeypatch.setattr("brim.workflows.prediction.run.peak_meter", lambda device: Meter())
    said = []
    model = brim.Model({"base_model": str(tiny_base), "trainer": {"type": "none"}, "generation": {"max_new_tokens": 2}})
    model.predict({"prompt": ["add 1 and 2 ="]}, output=tmp_path / "p.jsonl", say=said.append)
    assert [line for line in said if line.startswith("memory: 1048576.0 TiB were taken at the peak, more than ")]
