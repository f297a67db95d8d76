"""Which evaluations are planned from traces, by a bound or not at all, and what they find."""

import numpy as np
import pytest

import brim
from brim.api import forward_planning
from brim.api.forward_planning import Unplanned, batches_of, plan_forward
from brim.errors import BrimError
from brim.infer.rows_by_cost import RowsByCost
from brim.infer.rows_by_trial import RowsByTrial

LENGTHS = np.array([5, 9, 30, 60])


@pytest.fixture(autouse=True)
def _nothing_was_traced_before(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def session(zero_shot):
    return brim.Model(zero_shot)._open()


def test_a_job_that_is_shorter_than_tracing_is_planned_by_a_bound(session):
    plan = plan_forward(session, LENGTHS)
    assert plan.source == "closed form"
    assert str(plan).endswith("(by a bound in closed form: tracing pays from 30.0 s on)")
    assert isinstance(batches_of(plan, session.device, on_smaller=print), RowsByCost)


def test_a_longer_job_is_traced_once_for_all(session, monkeypatch):
    monkeypatch.setattr(forward_planning, "_WORTH_TRACING_S", 0.0)
    first = plan_forward(session, LENGTHS)
    assert first.source == "traced"
    monkeypatch.setattr(forward_planning, "_WORTH_TRACING_S", 1e9)
    again = plan_forward(session, LENGTHS)  # what was found is used by later jobs, however short
    assert (again.source, again.costs) == ("traced", first.costs)
    state = plan_forward(session, LENGTHS, beside_bytes=10**6)
    assert state.costs.static_bytes == pytest.approx(first.costs.static_bytes + 10**6, abs=10**4)


def test_an_architecture_that_cannot_be_traced_is_tried_out(session, sums_file, zero_shot, monkeypatch):
    monkeypatch.setattr(forward_planning, "_WORTH_TRACING_S", 0.0)

    def untraceable(*given, **how):
        raise NotImplementedError("values are asked for")

    expected = brim.Model(zero_shot).evaluate(sums_file, batch_size=3)
    monkeypatch.setattr(forward_planning, "forward_model", untraceable)
    plan = plan_forward(session, [7])
    assert isinstance(plan, Unplanned)
    assert isinstance(batches_of(plan, session.device, on_smaller=print), RowsByTrial)
    said = []
    result = brim.Model(zero_shot).evaluate(sums_file, say=said.append)
    assert said == [
        "evaluation: the architecture 'llama' cannot be traced: NotImplementedError: values are asked for; so batches "
        "are tried out: the longest row alone, then twice as many tokens each time"
    ]
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)  # of a perplexity, that of losses is 1e-5


def test_the_batches_of_an_evaluation_change_no_figure(zero_shot, sums_file):
    figures = [
        brim.Model({**zero_shot, "trainer": {"type": "none", "eval_batch_size": size}}).evaluate(sums_file).metrics
        for size in ("auto", None, 1, 7)
    ]
    assert all(each == pytest.approx(figures[0], rel=1e-4) for each in figures)
    assert all(each["loss"] == pytest.approx(figures[0]["loss"], rel=1e-5) for each in figures)
    assert figures[0] == figures[1]


def test_a_budget_that_the_process_exceeds_already_is_told(zero_shot, sums_file):
    model = brim.Model({**zero_shot, "memory": {"budget": "50MiB"}})
    with pytest.raises(BrimError, match=r"of 50.0 MiB \(memory.budget\)"):
        model.evaluate(sums_file)
