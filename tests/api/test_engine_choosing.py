"""The engine of a job: measured where that pays, remembered, and named by the configuration."""

from dataclasses import replace

import numpy as np
import pytest

import brim
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError
from brim.infer.engines import PagedEngine, SlotsEngine, StaticEngine, respond_to
from brim.models import load_llm
from brim.planning import (
    GenerationPlan,
    engines as engine_choice,
    generation_launch as planned_generation,
    plan_generation,
    planned_engine,
)
from brim.planning.generation import request_of
from brim.session import open_session


@pytest.fixture
def opened(zero_shot):
    """A session whose generation has these keys, and its model."""

    def of(**generation):
        settings = {"do_sample": False, "max_new_tokens": 4, **generation}
        session = open_session(brim.Model({**zero_shot, "generation": settings}).config)
        return session, load_llm(session.config, session.folder, session.device, trainable=False)

    return of


PROMPTS = TokenRows.from_rows(
    TokenRow(key=key, input_ids=np.arange(2, 3 + key % 5, dtype=np.int32), supervised=np.zeros(1 + key % 5, np.bool_))
    for key in range(40)
)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("slots", SlotsEngine), ("static", StaticEngine), ("paged", PagedEngine), ("auto", SlotsEngine)],
)
def test_the_configuration_names_the_engine_and_all_say_the_same(opened, engine, kind):
    session, llm = opened(engine=engine)
    planned = planned_engine(llm, session, PROMPTS, say=lambda line: None)
    assert isinstance(planned.engine, kind)
    assert planned.plan.engine == planned.engine.name
    usual = planned_engine(llm, opened(engine="slots")[0], PROMPTS, say=lambda line: None)
    assert respond_to(planned.engine, PROMPTS) == respond_to(usual.engine, PROMPTS)


def test_a_short_job_measures_nothing_and_says_so(opened):
    session, llm = opened()
    said = []
    planned = planned_engine(llm, session, PROMPTS, say=said.append)
    assert planned.plan.engine_reason.startswith("the usual choice, not measured: ")
    assert [line for line in said if line.startswith("engine: slots (the usual choice, not measured: ")]


@pytest.fixture
def long_job(monkeypatch):
    """Three rows run at once, and measuring may take as long as the job."""

    def plan(request, *, say):
        return replace(plan_generation(replace(request, fixed_rows=3), say=say), seconds=20.0)

    monkeypatch.setattr(engine_choice, "_SHARE_OF_RUN", 1.0)
    monkeypatch.setattr(planned_generation, "plan_generation", plan)


def test_a_long_job_measures_on_some_prompts_and_remembers(opened, long_job):
    session, llm = opened()
    said = []
    planned = planned_engine(llm, session, PROMPTS, say=said.append)
    assert "measuring 4 engines on 6 of the prompts" in said
    reason = planned.plan.engine_reason
    assert reason.startswith("rows/s over 6 rows: ")
    assert "slots" in reason
    assert "differ" not in reason
    said.clear()
    again = planned_engine(llm, session, PROMPTS, say=said.append)
    assert again.plan.engine_reason == f"measured by an earlier job: {reason}"
    assert again.plan.engine == planned.plan.engine
    assert not [line for line in said if line.startswith("measuring")]


def test_what_samples_is_not_measured_in_pages(opened, long_job):
    session, llm = opened(do_sample=True, temperature=1.0)
    said = []
    planned = planned_engine(llm, session, PROMPTS, say=said.append)
    assert "measuring 3 engines on 6 of the prompts" in said
    assert "paged: generation.do_sample: what is drawn would depend on the rows beside it" in planned.plan.engine_reason
    assert "differ" not in planned.plan.engine_reason


def test_where_memory_is_scarce_only_brims_own_engine_is_tried(opened, long_job, monkeypatch):
    monkeypatch.setattr(GenerationPlan, "is_ample", False)
    monkeypatch.setattr(planned_generation, "proven", lambda plan, *given, **more: plan)
    session, llm = opened()
    said = []
    planned = planned_engine(llm, session, PROMPTS, say=said.append)
    assert "measuring 2 engines on 6 of the prompts" in said
    assert planned.plan.engine_reason.endswith("; static: not tried where more than half of the memory is planned")


def test_beams_leave_no_choice(opened):
    request = request_of(opened(num_beams=2)[0], PROMPTS.lengths)
    assert (request.engine, request.engine_reason) == ("static", "generation.num_beams: beams stay together")


def test_an_engine_that_cannot_is_refused(opened):
    session, llm = opened(engine="paged", num_beams=2)
    with pytest.raises(InputError, match=r"continuous batching cannot be used: generation.num_beams: it has no beams"):
        planned_engine(llm, session, PROMPTS, say=lambda line: None)
    session, llm = opened(engine="slots", num_beams=2)
    with pytest.raises(InputError, match=r"generation.engine is slots, and generation.num_beams: beams stay together"):
        planned_engine(llm, session, PROMPTS, say=lambda line: None)


def test_the_plan_names_the_engine_that_is_asked_for(opened):
    session, _ = opened(engine="paged")
    plan = plan_generation(request_of(session, PROMPTS.lengths))
    assert (plan.engine, plan.engine_reason) == ("paged", "generation.engine")
