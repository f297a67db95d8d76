"""Which evaluations are planned from traces, by a bound or not at all, and what they find."""

import numpy as np
import pytest

import brim
from brim.errors import BrimError
from brim.infer import BATCH_TOKENS
from brim.infer.engines import RowsByCost, RowsByTrial
from brim.planning import evaluation as forward_planning
from brim.planning.evaluation import Unplanned, batches_of, plan_forward

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


@pytest.fixture
def resident(monkeypatch):
    """What the process takes does not change in a test, so that a budget of a few bytes more than it has a meaning."""
    from brim.memory import budget as at_hand

    monkeypatch.setattr(at_hand, "resident_bytes", lambda: 10**9)


def _scored(config, sums_file, output):
    """Log-probabilities, and the (rows, tokens) of the passes in which they were found."""
    model = brim.Model(config)
    model.predict(sums_file, output=output)
    shapes = []
    model._weights().model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape))
    )
    result = model.predict(sums_file, output=output, scores=True, resume=True)
    return result.predictions["log_probability"].to_numpy(), shapes[1:]  # the first reads the weights


def test_scores_are_found_in_batches_that_the_budget_holds(session, zero_shot, sums_file, tmp_path, resident):
    config = {**zero_shot, "trainer": {"type": "none", "batch_size": 4}}
    ample, (shape,) = _scored(config, sums_file, tmp_path / "ample.csv")
    assert shape[0] == 40  # all of them are less than the tokens of a batch
    llm = brim.Model(zero_shot)._weights()
    plan = plan_forward(session, np.full(40, shape[1]), llm=llm, whole_tokens=BATCH_TOKENS)
    assert plan.widest[0] == 40
    allowed_bytes = int(plan.costs.peak_bytes(7, shape[1]))
    config["memory"] = {"budget": f"{plan.budget.outside_bytes + allowed_bytes}B", "margin": "0B"}
    scarce, shapes = _scored(config, sums_file, tmp_path / "scarce.csv")
    assert sum(rows for rows, _ in shapes) == 40
    assert len(shapes) > 1
    assert all(plan.costs.peak_bytes(rows, tokens) <= allowed_bytes for rows, tokens in shapes)
    np.testing.assert_allclose(scarce, ample, rtol=1e-5)


def test_batches_to_score_do_not_depend_on_what_is_fastest(session, resident, monkeypatch):
    """Where memory is ample they stay whole, to the row, whatever a plan would choose."""
    lengths = np.full(400, 30)
    free, whole = plan_forward(session, lengths), plan_forward(session, lengths, whole_tokens=BATCH_TOKENS)
    batches = whole.cutter().cut(lengths[: BATCH_TOKENS // 30])
    assert [batch.num_rows for batch in batches] == [BATCH_TOKENS // 30]
    assert whole.cap_bytes == pytest.approx(float(whole.costs.peak_bytes(BATCH_TOKENS // 30, 30)), rel=1e-3)
    assert free.cap_bytes != whole.cap_bytes
