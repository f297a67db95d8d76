"""A plan for generation proven on the device: one try of the passes that take the most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import brim
from brim.api.generation_launch import proven
from brim.api.generation_planning import plan_job
from brim.api.generation_request import request_of
from brim.api.inference import settings_of
from brim.batching.random_states import random_states
from brim.planning.calibration import TELLING_BYTES

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
    monkeypatch.setattr("brim.api.generation_launch.peak_passes", None)
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

    monkeypatch.setattr("brim.api.generation_launch.peak_passes", run_out)
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
        "brim.api.generation_launch._Trial.probe",
        lambda trial, shape: a_probe(shape.rows, measured),
    )
    monkeypatch.setattr("brim.api.generation_launch._with_what_is_left", lambda plan, request, say: plan)
    found = proven(plan, request, llm, settings, say=print)
    predicted = plan.uncorrected_bytes - costs.static_bytes
    assert found.costs.scale == pytest.approx(3 * TELLING_BYTES / predicted)
    assert found.rows < 40  # what was tried would fit, but for the prediction of all that may come
    assert request.calibrations.correction().scale == pytest.approx(found.costs.scale)


def a_probe(rows, peak_bytes):
    from brim.batching.probe import Probe

    return Probe(size=rows, steps=1, outcome="fits", peak_bytes=peak_bytes, seconds=0.1)


def test_rows_that_were_given_are_not_tried_and_the_plan_says_what_it_would_take(at_hand):
    session, llm, settings = at_hand
    request = request_of(session, LENGTHS, llm=llm, fixed_rows=3)
    plan = proven(plan_job(request, say=print), request, llm, settings, say=print)
    assert plan.rows == 3
    assert plan.proof.endswith("since their number was given")
