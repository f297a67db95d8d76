"""How a job of generating or scoring is planned, proven on the device, and which engine writes its responses."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.infer.fake_vllm import install
from transformers import GenerationConfig

import brim
from brim.batching.memory import Probe, random_states
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import BrimError, InputError
from brim.infer.engines import RowsByCost, RowsByTrial, SlotsEngine, StaticEngine, respond_to
from brim.infer.metrics import BATCH_TOKENS
from brim.memory.devices import budget as at_hand_budget
from brim.models import load_llm
from brim.planning import Unplanned, evaluation as forward_planning, plan_forward, scoring_lines
from brim.planning.costs.time import TELLING_BYTES
from brim.planning.generation import generation_request, plan_job
from brim.session import open_session, say_nothing
from brim.workflows.prediction import launch as engine_choice
from brim.workflows.prediction.generation import Generation
from brim.workflows.prediction.launch import planned_engine, proven, vllm_engine, with_engine
from brim.workflows.prediction.scoring import batches_of
from brim.workflows.runs import settings_of

LENGTHS = [20] * 10 + [10] * 30


@pytest.fixture(scope="module")
def at_hand(tiny_base):
    """A session, its model and the settings of generation."""
    model = brim.Model({"base_model": str(tiny_base), "generation": {"max_new_tokens": 6, "do_sample": True}})
    session, llm = model._open(), model._weights()
    return session, llm, settings_of(session, llm.model.generation_config)


def test_a_response_ends_where_training_put_the_end_and_where_the_model_itself_stops(at_hand):
    session, _, settings = at_hand
    end = session.encoder.eos_id
    for own, expected in [(None, [end]), (end, [end]), (9, [end, 9]), ([9, end, 8], [end, 9, 8])]:
        assert settings_of(session, GenerationConfig(eos_token_id=own)) == {**settings, "eos_token_id": expected}


@pytest.fixture
def scarce(at_hand, monkeypatch, tmp_path):
    """A plan that takes all of the memory, the request for it, and what to prove it with."""
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path))
    session, llm, settings = at_hand
    request = generation_request(session, LENGTHS, llm=llm)
    plan = plan_job(request, say=print)
    assert plan.source == "closed form"  # a job of some milliseconds is not worth a trace
    return replace(plan, total_bytes=plan.budget.limit_bytes), request, llm, settings


def test_where_less_than_half_of_the_memory_is_needed_or_rows_are_given_nothing_is_tried(at_hand, monkeypatch):
    session, llm, settings = at_hand
    monkeypatch.setattr("brim.workflows.prediction.launch.peak_passes", None)
    for given, rows, why in (
        ({}, 40, "not tried before the first rows, since less than half of the memory is needed"),
        ({"fixed_rows": 3}, 3, "since their number is configured"),
    ):
        request = generation_request(session, LENGTHS, llm=llm, **given)
        plan = proven(plan_job(request, say=print), request, llm, settings, say=print)
        assert plan.rows == rows
        assert plan.proof.endswith(why)


def test_the_first_rows_are_tried_once_and_leave_no_trace(scarce):
    plan, request, llm, settings = scarce
    before = random_states()
    found = proven(plan, request, llm, settings, say=print)
    assert found.rows == 40
    assert found.proof.startswith("40 rows × 25 tokens ran and fitted (1 probe")
    after = random_states()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    again = proven(plan, request, llm, settings, say=print)
    assert again.proof == "not tried before the first rows, since as much has run before"


def test_where_they_run_out_of_memory_fewer_are_taken(scarce, monkeypatch):
    plan, request, llm, settings = scarce
    tried = []

    def run_out(passes, chooser, shape):
        tried.append(shape.rows)
        if shape.rows > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("brim.workflows.prediction.launch.peak_passes", run_out)
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
        "brim.workflows.prediction.launch._Trial.probe",
        lambda trial, shape: Probe(size=shape.rows, steps=1, outcome="fits", peak_bytes=measured, seconds=0.1),
    )
    monkeypatch.setattr("brim.workflows.prediction.launch._with_what_is_left", lambda plan, request, say: plan)
    found = proven(plan, request, llm, settings, say=print)
    predicted = plan.uncorrected_bytes - costs.static_bytes
    assert found.costs.scale == pytest.approx(3 * TELLING_BYTES / predicted)
    assert found.rows < 40  # what was tried would fit, but for the prediction of all that may come
    assert request.calibrations.correction().scale == pytest.approx(found.costs.scale)


def planned(tiny_base, monkeypatch, *, reserved_bytes=None, **generation):
    """The plan of 40 prompts with transformers' `generate`."""
    model = brim.Model({"base_model": str(tiny_base), "generation": {"max_new_tokens": 6, **generation}})
    request = generation_request(model._open(), LENGTHS, llm=model._weights())
    if reserved_bytes is not None:
        budget = plan_job(request, say=print).budget
        there = replace(budget, limit_bytes=budget.outside_bytes + reserved_bytes, margin_bytes=0)
        monkeypatch.setattr("brim.planning.request.budget_of", lambda *args, **given: there)
    return plan_job(request, say=print)


BEAMS = {"num_beams": 4, "do_sample": False}


def test_with_less_memory_fewer_prompts_with_their_beams_run_together(tiny_base, monkeypatch):
    all_together = planned(tiny_base, monkeypatch, **BEAMS)
    assert (all_together.engine, all_together.source) == ("static", "closed form")
    assert all_together.engine_reason == "generation.num_beams: beams stay together"
    assert (all_together.rows, all_together.rows_reason) == (40, "all rows together")
    one = all_together.costs
    a_row, weights = float(one.peak_bytes(1, 26)) - one.static_bytes, one.static_bytes
    for rows in (1, 3, 9):
        monkeypatch.undo()
        plan = planned(tiny_base, monkeypatch, reserved_bytes=round(weights + (rows + 0.5) * a_row), **BEAMS)
        assert (plan.rows, plan.memory_rows) == (rows, rows)
        assert plan.rows_reason == "as many as there is memory for"
        assert plan.total_bytes <= plan.budget.limit_bytes
    fewer = planned(tiny_base, monkeypatch, reserved_bytes=round(weights + 9.5 * a_row), **(BEAMS | {"num_beams": 8}))
    assert 4 <= fewer.rows <= 5
    monkeypatch.undo()
    for generation, reason in (
        ({"num_beams": 2, "do_sample": True}, "beams that sample draw from one generator, so rows go one by one"),
        ({"prompt_lookup_num_tokens": 2, "do_sample": False}, "prompt lookup takes one row at a time"),
    ):
        plan = planned(tiny_base, monkeypatch, **generation)
        assert (plan.rows, plan.rows_reason) == (1, reason)


def test_a_peak_above_the_budget_is_said(zero_shot, monkeypatch, tmp_path):
    meter = SimpleNamespace(begin=lambda: None, peak_bytes=lambda: 2**60)
    monkeypatch.setattr("brim.workflows.prediction.generation.peak_meter", lambda device: meter)
    said = []
    brim.Model(zero_shot).predict({"question": ["add 1 ="]}, output=tmp_path / "p.jsonl", say=said.append)
    assert [line for line in said if line.startswith("memory: the peak was 1048576.0 TiB, more than ")]


def test_a_number_of_rows_by_hand_is_taken_and_the_plans_own_is_told(zero_shot):
    """The texts are the same."""
    rows = {"question": [f"add {number} and 2 =" for number in range(20)]}
    model, by_hand, planned = brim.Model({**zero_shot, "trainer": {"type": "none"}}), [], []
    three = model.predict(rows, batch_size=3, say=by_hand.append).predictions
    alone = model.predict(rows, say=planned.append).predictions
    assert any(re.match(r"batch: 3 rows of up to .* \(as configured\); engine ", line) for line in by_hand)
    (found,) = filter(None, (re.match(r"batch: (\d+) rows of [^(]* \(([^)]*)\); engine ", line) for line in planned))
    assert f"without a configured number the plan would take {found[1]} rows ({found[2]})" in by_hand
    assert three["answer_response"].tolist() == alone["answer_response"].tolist()


@pytest.fixture
def session(zero_shot, tmp_path, monkeypatch):
    """Nothing was traced before."""
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))
    return brim.Model(zero_shot)._open()


def test_a_job_that_is_shorter_than_tracing_is_planned_by_a_bound_and_a_longer_one_is_traced_once(session, monkeypatch):
    lengths = np.array([5, 9, 30, 60])
    plan = plan_forward(session, lengths)
    assert plan.source == "closed form"
    (told,) = scoring_lines(plan, doing="scoring", is_part=True)
    assert told.endswith("(by an upper bound, not traced: tracing pays from 30.0 s on)")
    assert isinstance(batches_of(plan, session.device, on_smaller=print), RowsByCost)
    monkeypatch.setattr(forward_planning, "WORTH_TRACING_S", 0.0)
    first = plan_forward(session, lengths)
    assert first.source == "traced"
    state = plan_forward(session, lengths, beside_bytes=10**6)
    assert state.costs.static_bytes == pytest.approx(first.costs.static_bytes + 10**6, abs=10**4)
    monkeypatch.setattr(forward_planning, "WORTH_TRACING_S", 30.0)
    assert plan_forward(session, lengths).source == "closed form"  # whatever other jobs have traced


def test_an_architecture_that_cannot_be_traced_is_tried_out(session, sums_file, zero_shot, monkeypatch):
    monkeypatch.setattr(forward_planning, "WORTH_TRACING_S", 0.0)
    expected = brim.Model(zero_shot).evaluate(sums_file, batch_size=3)
    untraceable = Mock(side_effect=NotImplementedError("values are asked for"))
    monkeypatch.setattr(forward_planning, "forward_costs", untraceable)
    plan = plan_forward(session, [7])
    assert isinstance(plan, Unplanned)
    assert isinstance(batches_of(plan, session.device, on_smaller=print), RowsByTrial)
    said = []
    result = brim.Model(zero_shot).evaluate(sums_file, say=said.append)
    (told,) = [line for line in said if line.startswith("evaluation")]
    assert told.startswith("evaluation: the architecture 'llama' cannot be traced: NotImplementedError: values are")
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)  # of a perplexity, that of losses is 1e-5


def test_the_batches_of_an_evaluation_change_no_figure(zero_shot, sums_file):
    models = (brim.Model(zero_shot, overrides=[f"trainer.eval_batch_size={size}"]) for size in ("auto", "null", 1, 7))
    figures = [model.evaluate(sums_file).metrics for model in models]
    for each in figures:
        assert each == pytest.approx(figures[0], rel=1e-4)
        assert each["loss"] == pytest.approx(figures[0]["loss"], rel=1e-5)
    assert figures[0] == figures[1]
    with pytest.raises(BrimError, match=r"of 50.0 MiB \(memory.budget\)"):  # which the process exceeds already
        brim.Model({**zero_shot, "memory": {"budget": "50MiB"}}).evaluate(sums_file)


def _scored(config, sums_file, output):
    """Log-probabilities, and the (rows, tokens) of the passes in which they were found."""
    model, shapes = brim.Model(config), []
    model.predict(sums_file, output=output)
    embed = model._weights().model.get_input_embeddings()
    embed.register_forward_pre_hook(lambda module, given: shapes.append(tuple(given[0].shape)))
    result = model.predict(sums_file, output=output, scores=True, resume=True)
    return result.predictions["log_probability"].to_numpy(), shapes[1:]  # the first reads the weights


def test_scores_are_found_in_batches_that_the_budget_holds(session, zero_shot, sums_file, tmp_path, monkeypatch):
    monkeypatch.setattr(at_hand_budget, "resident_bytes", lambda: 10**9)  # or a few bytes more would mean nothing
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


def test_batches_to_score_do_not_depend_on_what_is_fastest(session, monkeypatch):
    """Where memory is ample they stay whole, to the row, whatever a plan would choose."""
    monkeypatch.setattr(at_hand_budget, "resident_bytes", lambda: 10**9)
    lengths = np.full(400, 30)
    free, whole = plan_forward(session, lengths), plan_forward(session, lengths, whole_tokens=BATCH_TOKENS)
    batches = whole.cutter().cut(lengths[: BATCH_TOKENS // 30])
    assert [batch.num_rows for batch in batches] == [BATCH_TOKENS // 30]
    assert whole.cap_bytes == pytest.approx(float(whole.costs.peak_bytes(BATCH_TOKENS // 30, 30)), rel=1e-3)
    assert free.cap_bytes != whole.cap_bytes


@pytest.fixture
def opened(zero_shot, tmp_path, monkeypatch):
    """A session whose generation has these keys, and its model; nothing was measured before."""
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))

    def of(*, packing=False, **generation):
        settings = {"do_sample": False, "max_new_tokens": 4, **generation}
        trainer = {**zero_shot["trainer"], "packing": packing}
        session = open_session(brim.Model({**zero_shot, "trainer": trainer, "generation": settings}).config)
        return session, load_llm(session.config, session.folder, session.device, trainable=False)

    return of


PROMPTS = TokenRows.from_rows(
    TokenRow(key=key, input_ids=np.arange(2, 3 + key % 5, dtype=np.int32), supervised=np.zeros(1 + key % 5, np.bool_))
    for key in range(40)
)


def test_the_configuration_names_the_engine_and_all_say_the_same(opened):
    usual, _ = planned_engine(opened()[1], opened(engine="slots")[0], PROMPTS, say=say_nothing)
    expected = respond_to(usual, PROMPTS)
    for engine, packing, kind, reason in (
        ("static", False, StaticEngine, "generation.engine"),
        ("static", True, StaticEngine, "generation.engine"),
        ("auto", False, SlotsEngine, "the configuration needs no other"),
        ("auto", True, SlotsEngine, "the configuration needs no other"),
    ):
        session, llm = opened(engine=engine, packing=packing)
        planned, plan = planned_engine(llm, session, PROMPTS, say=say_nothing)
        assert isinstance(planned, kind)
        assert plan.costs.is_packed == (packing and kind is SlotsEngine)
        assert (plan.engine, plan.engine_reason) == (planned.name, reason)
        assert respond_to(planned, PROMPTS) == expected
    session, llm = opened(engine="slots", num_beams=2)
    with pytest.raises(InputError, match=r"generation.engine is slots, and generation.num_beams: beams stay together"):
        planned_engine(llm, session, PROMPTS, say=say_nothing)


VLLM_PROMPTS = TokenRows.from_rows(
    TokenRow(key=key, input_ids=np.array([2, 5 + key], dtype=np.int32), supervised=np.zeros(2, np.bool_))
    for key in range(3)
)


@pytest.fixture
def session_of(zero_shot, monkeypatch):
    """As if there were a GPU."""
    monkeypatch.setattr(engine_choice, "_memory_share", lambda session: 0.8)

    def of(**keys):
        generation = {"engine": "vllm", "max_new_tokens": 3, "do_sample": False}
        opened = open_session(brim.Model({**zero_shot, "generation": generation, **keys}).config)
        return replace(opened, device=torch.device("cuda"))

    return of


def test_vllm_writes_a_jobs_responses_without_brims_own_weights(session_of, tiny_base, tmp_path, monkeypatch):
    engines = install(monkeypatch, lambda prompt, params: [prompt[-1], 0])
    assert Generation(None, session_of(), VLLM_PROMPTS, is_spent=True, say=say_nothing).about["engine"] == "vllm"
    responses = respond_to(vllm_engine(session_of(), rows=None), VLLM_PROMPTS)
    assert [response.token_ids for response in responses] == [[5], [6], [7]]
    args = engines.made[0].args
    assert (args.model, args.dtype, args.gpu_memory_utilization, args.seed) == (str(tiny_base), "float32", 0.8, 42)
    assert engines.made[0].submitted[0][2].stop_token_ids == [0]
    base = shutil.copytree(tiny_base, tmp_path / "base")  # whose own ends count
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    engine = vllm_engine(session_of(base_model=str(base)), rows=5)
    engine.run(VLLM_PROMPTS, on_finished=lambda finished: None)
    assert engines.made[-1].submitted[0][2].stop_token_ids == [0, 7, 8]
    assert engines.made[-1].args.max_num_seqs == 5


def test_vllm_is_taken_on_a_gpu_that_has_it_unless_something_is_against_it(session_of, monkeypatch, tmp_path):
    install(monkeypatch, lambda prompt, params: [7])
    left_open = {"max_new_tokens": 3, "do_sample": False}

    def chosen(*, is_loaded=False, **keys):
        told = []
        session = with_engine(session_of(**{"generation": left_open, **keys}), is_loaded=is_loaded, say=told.append)
        return session.config.generation.engine, [str(line) for line in told]

    engine, (line,) = chosen()
    assert (engine, line) == ("vllm", "generation.engine: vllm (it is installed, and the device is a CUDA GPU)")
    for keys, reason in (
        ({"is_loaded": True}, "the model is loaded already"),
        ({"quantization": {"bits": 4}}, "the base is quantised"),
        ({"generation": {**left_open, "num_beams": 2}}, "generation.num_beams"),
    ):
        engine, (line,) = chosen(**keys)
        assert engine == "auto"
        assert reason in line
    assert chosen(generation={**left_open, "engine": "slots"}) == ("slots", [])
    monkeypatch.delitem(sys.modules, "vllm")
    (tmp_path / "vllm.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    engine, (line,) = chosen()
    assert (engine, line) == ("auto", "generation.engine: auto (vLLM cannot be imported: operator nms does not exist)")
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert chosen() == ("auto", [])


def test_what_vllm_cannot_do_is_refused(session_of, zero_shot, sums_file, monkeypatch):
    install(monkeypatch, lambda prompt, params: [7])
    generation = {"engine": "vllm", "max_new_tokens": 3}
    for keys, reason in (
        ({"quantization": {"bits": 4}}, "the base is quantised as it is loaded"),
        ({"initialize": "random"}, "initialize is random"),
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed, and it has no mixed one"),
        ({"generation": {**generation, "num_beams": 2}}, "generation.num_beams is not passed"),
    ):
        with pytest.raises(InputError, match=f"vLLM cannot be used: {reason}"):
            vllm_engine(session_of(**keys), rows=None)
    monkeypatch.undo()
    monkeypatch.setattr("brim.model.load_llm", None)  # a CPU is refused before that
    with pytest.raises(InputError, match="vLLM cannot be used: it is for a CUDA GPU, and the device is cpu"):
        brim.Model({**zero_shot, "generation": generation}).predict(sums_file)
