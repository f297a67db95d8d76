"""Adapters that are merged while responses are generated: the same texts, the same weights afterwards, or a reason."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tests.workflows.test_prediction_job import begun

import brim
from brim.errors import OutputError
from brim.infer.engines import SlotsEngine, StaticEngine
from brim.infer.metrics import Divergence
from brim.memory.devices import budget as at_hand_budget
from brim.models import merging
from brim.models.folders import ModelFolder
from brim.planning import generation as planning
from brim.workflows.prediction import Wanted, generation as module, plan_prediction
from brim.workflows.prediction.job import JobFolder

pytestmark = pytest.mark.run


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.setattr(module, "_WORTH_TOKENS", 1)


@pytest.fixture
def run(gallery, tmp_path, monkeypatch):
    """The folder of a run with an adapter; nothing was measured of it before."""
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))
    return gallery("lora").run


@pytest.fixture
def computed(monkeypatch):
    """Whether an adapter's own layers were there, each time that an engine ran."""
    seen = []
    for engine in (SlotsEngine, StaticEngine):
        original = engine.run

        def watched(self, prompts, *, on_finished, original=original):
            seen.append(any("lora_" in name for name, _ in self._model.named_parameters()))
            original(self, prompts, on_finished=on_finished)

        monkeypatch.setattr(engine, "run", watched)
    return seen


def predicted(model, data, **how):
    """The texts, and the note on the merge."""
    told = []
    found = model.predict(data, say=told.append, **how)
    (note,) = [str(line) for line in told if str(line).startswith("generation.merge_adapter")] or [""]
    return found.predictions["answer_response"].tolist(), note


def wanted(*, scores):
    unset = {"output": None, "key": None, "on_error": None, "on_overlong": None, "is_unnamed": False}
    return Wanted(split="full", scores=scores, **unset)


def state(model):
    return {name: weight.clone() for name, weight in model._weights().model.state_dict().items()}


@pytest.mark.parametrize("engine", ["slots", "static"])
def test_merged_texts_are_the_same_and_the_weights_come_back_to_the_bit(run, pays, computed, sums_file, engine):
    model = brim.Model.load(run, overrides=[f"generation.engine={engine}"])
    before = state(model)
    texts, _ = predicted(model, sums_file, generation={"merge_adapter": False})
    same, note = predicted(model, sums_file)
    assert computed[-2:] == [True, False]
    assert same == texts
    number = r"\d[\d.e-]*"
    told = rf"generation\.merge_adapter: True \(predictions move by {number} nats a token, the limit is {number}; "
    assert re.fullmatch(told + r".* are kept to put the weights back\)", note)
    assert float(re.search(r"move by (\S+)", note)[1]) < 1e-9
    for name, weight in state(model).items():
        assert torch.equal(weight, before[name])
    once, note = predicted(model, sums_file, keep_weights=False)  # as the command does
    assert (once, computed[-1]) == (texts, False)
    assert "kept" not in note
    assert model._llm is None
    assert torch.equal(state(model)["base_model.model.lm_head.weight"], before["base_model.model.lm_head.weight"])


@pytest.mark.parametrize("source", ["closed form", "traced"])
def test_the_plan_counts_what_is_kept(run, pays, sums_file, tmp_path, monkeypatch, source):
    monkeypatch.setattr(at_hand_budget, "resident_bytes", lambda: 10**9)
    if source == "traced":
        monkeypatch.setattr(planning, "WORTH_TRACING_S", 0.0)
    plans, foreseen = [], []
    for number, how in enumerate(({"keep_weights": True}, {"keep_weights": False})):
        model, path = brim.Model.load(run), tmp_path / f"{number}.csv"
        kept_bytes = module.PassingMerge(model._weights().model).kept_bytes
        model.predict(sums_file, output=path, **how)
        sittings = [json.loads(line) for line in JobFolder(path).sittings.read_text().split("\n") if line]
        assert sittings[0]["about"]["merge_adapter"] is True
        assert sittings[0]["about"]["plan"]["source"] == source
        plans.append(sittings[0]["about"]["plan"]["shapes"][0]["peak_bytes"])
        # Scores are of the weights as they were, which are kept for that.
        foreseen.append(plan_prediction(model.config, sums_file, wanted(scores=how["keep_weights"])))
    assert plans[0] - plans[1] == kept_bytes
    assert [each.shapes[0].peak_bytes for each in foreseen] == pytest.approx(plans, abs=100)  # of buffers
    assert [each.source for each in foreseen] == [source] * 2


def test_a_merged_plan_is_without_the_adapter_where_weights_that_train_would_be_larger(run, sums_file, monkeypatch):
    monkeypatch.setattr(planning, "WORTH_TRACING_S", 0.0)
    monkeypatch.setattr(ModelFolder, "stored_dtype", torch.bfloat16)
    held_bytes = []
    for merge_adapter in ("true", "false"):
        overrides = ["precision=bf16-mixed", f"generation.merge_adapter={merge_adapter}"]
        config = brim.Model.load(run, overrides=overrides).config
        held_bytes.append(plan_prediction(config, sums_file, wanted(scores=False)).costs.static_bytes)
    adapter = load_file(run / "model" / "adapter_model.safetensors")
    assert held_bytes[1] - held_bytes[0] == sum(weight.nbytes for weight in adapter.values())


@pytest.mark.parametrize("overrides", [["precision=bf16-true"], ["precision=bf16-mixed"]])
def test_in_16_bits_weights_come_back_too(run, pays, computed, sums_file, overrides):
    model = brim.Model.load(run, overrides=overrides)
    before = state(model)
    _, note = predicted(model, sums_file)
    assert computed == [False]
    assert 0 < float(re.search(r"move by (\S+)", note)[1]) < 0.001
    for name, weight in state(model).items():
        assert torch.equal(weight, before[name])


def test_what_is_not_merged_is_told_with_its_reason(run, computed, sums_file, monkeypatch):
    model = brim.Model.load(run)
    _, note = predicted(model, sums_file)
    assert note.endswith("(responses have up to 240 tokens, and it pays from 16,384 on)")
    for overrides, foreseen in (
        ([], note),
        (["quantization.bits=4"], note[: note.index("(")] + "(the base is quantised)"),
    ):
        told = []
        plan_prediction(
            brim.Model.load(run, overrides=overrides).config, sums_file, wanted(scores=False), say=told.append
        )
        assert foreseen in told
    monkeypatch.setattr(module, "_WORTH_TOKENS", 1)
    with monkeypatch.context() as patched:
        patched.setattr(Divergence, "LEAST", 0.0)
        patched.setattr(Divergence, "SHARE", 0.0)
        _, note = predicted(model, sums_file)
    assert re.search(r"False \(predictions move by \S+ nats a token, the limit is 0\)", note)
    monkeypatch.setattr(at_hand_budget, "resident_bytes", lambda: 10**9)
    left_bytes = (
        2**31 - 10**9 - at_hand_budget.PACKING_BYTES - module.PassingMerge(model._weights().model).working_bytes
    )
    for kept_bytes, reason in (
        (left_bytes - 100_000, r"beside the weights that are kept, .*, \d+ rows? would run together, not 40"),
        (left_bytes + 1_000, r"merging takes 1\.1 GiB, and 1\.1 GiB are left beside the weights"),
    ):
        monkeypatch.setattr(module.PassingMerge, "kept_bytes", kept_bytes)
        small = brim.Model.load(run, overrides=["memory.budget=2GiB", "memory.margin=0B"])
        _, note = predicted(small, sums_file)
        assert re.search(reason, note)
    with pytest.raises(brim.InputError, match=r"cannot be merged while responses are generated: merging .*\n.*: auto$"):
        small.predict(sums_file, generation={"merge_adapter": True})
    assert all(computed)


def test_what_was_begun_merged_goes_on_merged(run, pays, computed, sums_file, tmp_path, monkeypatch):
    path = tmp_path / "p.csv"
    begun(brim.Model.load(run), sums_file, path)
    monkeypatch.setattr(module, "_WORTH_TOKENS", 10**9)
    with pytest.raises(OutputError, match="the adapter was merged when it began"):
        brim.Model.load(run).predict(sums_file, output=path, resume=True, generation={"merge_adapter": False})
    with monkeypatch.context() as patched:
        patched.setattr(module.PassingMerge, "working_bytes", 2**50)
        began = r"cannot be merged .*, as it was when this prediction began: merging takes 1024\.0 TiB, .*"
        with pytest.raises(
            brim.InputError, match=rf"{began}\n  fix: .* raise memory.budget, or write to another output"
        ):
            brim.Model.load(run).predict(sums_file, output=path, resume=True)
    brim.Model.load(run).predict(sums_file, output=path, resume=True)
    assert computed == [False, False]
    other = tmp_path / "q.csv"
    begun(brim.Model.load(run), sums_file, other)
    monkeypatch.setattr(module, "_WORTH_TOKENS", 1)
    brim.Model.load(run).predict(sums_file, output=other, resume=True)
    assert computed[2:] == [True, True]
    assert path.read_bytes() == other.read_bytes()


def test_what_fails_before_the_first_row_has_the_weights_put_back_at_once(run, pays, sums_file, monkeypatch):
    model = brim.Model.load(run)
    before = state(model)
    monkeypatch.setattr(planning.GenerationPlan, "as_dict", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        model.predict(sums_file)
    assert caught.tb is not None  # as a notebook keeps the last error, and with it what was merged
    assert state(model).keys() == before.keys()


@pytest.mark.parametrize("most", [0, 4 * module._PROBE_ROWS + 2])  # weights: while it is compared, and while it is done
def test_where_memory_runs_out_over_a_merge_the_adapter_stays_beside_its_base(
    run, pays, computed, sums_file, monkeypatch, most
):
    model = brim.Model.load(run)
    before, made = state(model), []
    flags = [weight.requires_grad for weight in model._weights().model.parameters()]
    merged_weight = merging._merged_weight

    def runs_out(layer, adapter):
        if len(made) == most:
            raise torch.OutOfMemoryError("out of memory")
        made.append(layer)
        return merged_weight(layer, adapter)

    monkeypatch.setattr(merging, "_merged_weight", runs_out)
    _, note = predicted(model, sums_file)
    assert re.fullmatch(r"generation\.merge_adapter: False \(memory ran out while it was .*\)", note)
    assert computed == [True]
    assert all(torch.equal(weight, before[name]) for name, weight in state(model).items())
    assert [weight.requires_grad for weight in model._weights().model.parameters()] == flags
    made.clear()
    if most:
        with pytest.raises(brim.OutOfMemoryError, match="memory ran out while it was merged"):
            model.predict(sums_file, keep_weights=False)


def test_scores_are_of_the_weights_as_they_were_also_where_these_are_given_up(run, pays, sums_file, monkeypatch):
    kept, done = [], module.PassingMerge.done
    monkeypatch.setattr(
        module.PassingMerge, "done", lambda self, *, keeps: kept.append(keeps) or done(self, keeps=keeps)
    )
    for scores in (False, True):
        brim.Model.load(run).predict(sums_file, scores=scores, keep_weights=False)
    assert kept == [False, True]


@pytest.mark.parametrize(("merge_adapter", "is_merged"), [("auto", False), (True, True)])
def test_fewer_rows_are_a_reason_against_a_merge_unless_it_is_asked_for(
    run, pays, sums_file, monkeypatch, merge_adapter, is_merged
):
    def fewer(plan, *given, **more):
        return SimpleNamespace(rows=plan.rows - 1, fits=plan.fits)

    monkeypatch.setattr(module, "recut", fewer)
    model = brim.Model.load(run)
    _, note = predicted(model, sums_file, generation={"merge_adapter": merge_adapter})
    assert note.startswith(f"generation.merge_adapter: {is_merged}")


@pytest.mark.parametrize(
    ("merge_adapter", "keeps", "is_merged"), [("auto", True, False), ("auto", False, True), (True, True, True)]
)
def test_where_no_costs_are_predicted_it_is_merged_where_nothing_is_kept_or_it_is_asked_for(
    run, pays, sums_file, monkeypatch, merge_adapter, keeps, is_merged
):
    monkeypatch.setattr(module, "plan_job", lambda request, *, say: SimpleNamespace(costs=None))
    model = brim.Model.load(run, overrides=[f"generation.merge_adapter={str(merge_adapter).lower()}"])
    _, note = predicted(model, sums_file, keep_weights=keeps)
    assert note.startswith(f"generation.merge_adapter: {is_merged}")
    assert is_merged or note.endswith("(what generation takes is not known, nor whether there is more)")
