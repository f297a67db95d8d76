"""How a run cuts its batches from its first step to its last, stopped, continued and run again."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.api.planned_run import settings, uneven

import brim
from brim.errors import Problem
from brim.memory import Budget, UntraceableError

DROPOUT = {"adapter": {"type": "lora", "dropout": 0.2}}


class StopAfter:
    """An observer that asks for a stop after a step, as Ctrl-C would."""

    def __init__(self, step):
        self._step, self.event = step, threading.Event()

    def start(self, *, first_step, total_steps, total_samples): ...

    def write(self, record):
        if record["step"] == self._step:
            self.event.set()

    def close(self): ...

    @contextmanager
    def request(self):
        yield self.event


@pytest.fixture
def own_cache(tmp_path, monkeypatch, tiny_base):
    """Plans of its own; traces are those of all."""
    monkeypatch.setattr("brim.planning.training_costs._KIND", f"plans of {tmp_path.name}")
    monkeypatch.setattr("brim.planning.costs.calibration._KIND", f"calibrations of {tmp_path.name}")


def train(base, folder, *, said=None, config=None, **options):
    brim.Model(config or settings(base)).train(
        uneven(), output_directory=folder, say=(said if said is not None else []).append, **options
    )
    return folder


def stopped(base, folder, monkeypatch, *, after, config=None):
    with monkeypatch.context() as patch:
        observer = StopAfter(after)
        patch.setattr("brim.workflows.training.training.stop_request", observer.request)
        with pytest.raises(KeyboardInterrupt):
            train(base, folder, config=config, observer=observer)
    torch.manual_seed(999)  # another process would not have these random states either
    return folder


def under(monkeypatch, reserved_bytes):
    """So much for weights, gradients, state and micro-batches, and nothing else."""
    budget = Budget(
        device="cpu",
        limit_bytes=reserved_bytes,
        outside_bytes=0,
        margin_bytes=0,
        limit_reason="as tested",
        margin_reason="as tested",
    )
    for where in ("brim.planning.training.budget_of", "brim.workflows.training.run_plan.budget_of"):
        monkeypatch.setattr(where, lambda *given, **how: budget)
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", True)  # what this process takes is not the plan's


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("split") == "train"]


def of(folder, name):
    return [step[name] for step in steps(folder)]


def plan_of(folder):
    return json.loads((folder / "plan.json").read_text())


def weights_of(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


def assert_same_weights(one, other):
    first, second = weights_of(one), weights_of(other)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16-mixed", 1e-2)])
def test_a_budget_decides_the_cut_and_not_the_losses(tiny_base, tmp_path, monkeypatch, precision, tolerance):
    config = settings(tiny_base, precision=precision)
    whole = train(tiny_base, tmp_path / "whole", config=config)
    under(monkeypatch, 600_000)
    small = train(tiny_base, tmp_path / "small", config=config)
    assert sum(of(small, "num_micro_batches")) > sum(of(whole, "num_micro_batches"))
    np.testing.assert_allclose(of(small, "loss"), of(whole, "loss"), rtol=tolerance)
    plan = plan_of(small)["plan"]
    assert plan["budget"]["limit_bytes"] == 600_000
    assert plan["chosen"]["cap_binds"]
    assert plan["chosen"]["cap_bytes"] == 600_000


@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_goes_on_keeps_its_plan_and_its_cuts_to_the_bit(tiny_base, tmp_path, monkeypatch, after):
    under(monkeypatch, 600_000)
    config = settings(tiny_base, trainer={"enable_gradient_checkpointing": "auto"}, **DROPOUT)
    whole = train(tiny_base, tmp_path / "whole", config=config)
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=after, config=config)
    before = (parts / "plan.json").read_bytes()
    monkeypatch.setattr("brim.workflows.training.run_plan.plan_run", None)  # it is not planned, nor tried
    monkeypatch.setattr("brim.workflows.training.run_plan.launch", None)
    train(tiny_base, parts, config=config, resume=True)
    assert (parts / "plan.json").read_bytes() == before
    for name in ("loss", "num_micro_batches", "effective_batch_size", "num_tokens", "learning_rate"):
        assert of(parts, name) == of(whole, name)
    assert_same_weights(parts, whole)


def test_where_whole_logits_are_faster_the_run_has_no_chunks(tiny_base, tmp_path, monkeypatch, own_cache):
    under(monkeypatch, 600_000)
    taken = []

    def the_second(candidates, *, has_more):
        taken.append(candidates[1].way)
        return candidates[1], "as tested"

    monkeypatch.setattr("brim.planning.training.choose", the_second)
    config = settings(tiny_base)
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=2, config=config)
    assert [way.chunked_loss for way in taken] == [False]
    before = (parts / "plan.json").read_bytes()
    assert {"key": "trainer.chunked_loss", "value": False, "reason": "as tested"} in plan_of(parts)["choices"]
    assert "chunked_loss: false" in (parts / "config.yaml").read_text()
    train(tiny_base, parts, config=config, resume=True)
    assert (parts / "plan.json").read_bytes() == before


def test_a_run_that_goes_on_under_less_memory_is_planned_anew_and_learns_the_same(tiny_base, tmp_path, monkeypatch):
    under(monkeypatch, 10_000_000)
    config = settings(tiny_base, trainer={"enable_gradient_checkpointing": "auto"})
    whole = train(tiny_base, tmp_path / "whole", config=config)
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=3, config=config)
    under(monkeypatch, 600_000)
    said = []
    train(tiny_base, parts, config=config, resume=True, said=said)
    assert "there is less memory than when the run was planned, so it is planned anew" in said
    assert plan_of(parts)["plan"]["budget"]["limit_bytes"] == 600_000
    cuts = of(parts, "num_micro_batches")
    assert cuts[:3] == of(whole, "num_micro_batches")[:3]
    assert sum(cuts[3:]) > sum(of(whole, "num_micro_batches")[3:])
    for name in ("effective_batch_size", "num_tokens", "num_samples", "learning_rate"):
        assert of(parts, name) == of(whole, name)
    np.testing.assert_allclose(of(parts, "loss"), of(whole, "loss"), rtol=1e-5)


def test_a_run_that_goes_on_with_another_budget_or_replan_is_planned_anew(tiny_base, tmp_path, monkeypatch):
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=2)
    said = []
    other = settings(tiny_base, memory={"margin": "64 MiB"})
    stopped_again = StopAfter(3)
    with monkeypatch.context() as patch:
        patch.setattr("brim.workflows.training.training.stop_request", stopped_again.request)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_base, parts, config=other, resume=True, said=said, observer=stopped_again)
    assert 'memory.margin is now "64 MiB"; it was "auto"' in said
    assert plan_of(parts)["plan"]["budget"]["margin_bytes"] == 64 * 2**20
    said = []
    train(tiny_base, parts, config=other, resume=True, replan=True, said=said)
    assert any(line.startswith("plan: ") and "found earlier" not in line for line in said)


@pytest.mark.parametrize("content", ["{", '{"plan": {"chosen": 3}, "launch": {}}', '{"plan": [], "launch": {}}'])
def test_a_damaged_plan_of_a_run_is_made_anew(tiny_base, tmp_path, monkeypatch, content):
    whole = train(tiny_base, tmp_path / "whole")
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=2)
    (parts / "plan.json").write_text(content)
    train(tiny_base, parts, resume=True)
    assert plan_of(parts)["plan"]["chosen"]["widest"] == plan_of(whole)["plan"]["chosen"]["widest"]
    assert of(parts, "loss") == of(whole, "loss")


def test_a_second_run_is_the_first_to_the_bit_although_that_one_measured(tiny_base, tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr("brim.planning.costs.timing._SHARE_OF_RUN", 1e4)
    config = settings(tiny_base, **DROPOUT)
    said = []
    first = train(tiny_base, tmp_path / "first", config=config)
    second = train(tiny_base, tmp_path / "second", config=config, said=said)
    plans = [plan_of(folder) for folder in (first, second)]
    assert "; timed " in plans[0]["launch"]["told"]
    assert plans[1]["launch"]["told"].endswith("; timed by an earlier run")
    assert [plan["plan"]["from_cache"] for plan in plans] == [False, True]
    assert plans[0]["plan"]["costs"] == plans[1]["plan"]["costs"]
    assert plans[0]["plan"]["chosen"]["time_source"] == "measured"
    assert of(first, "loss") == of(second, "loss")
    assert of(first, "num_micro_batches") == of(second, "num_micro_batches")
    assert_same_weights(first, second)


def test_a_run_after_brim_plan_is_the_run_without_it(tiny_base, tmp_path, monkeypatch, own_cache):
    config = settings(tiny_base, trainer={"chunked_loss": "auto"})
    alone = train(tiny_base, tmp_path / "alone", config=config, replan=True)
    shown = brim.plan(config, uneven(), replan=True)
    after = train(tiny_base, tmp_path / "after", config=config)
    assert shown.chosen.way == brim.plan(config, uneven()).chosen.way
    assert of(alone, "loss") == of(after, "loss")


def test_a_plan_that_is_damaged_on_the_disk_is_made_anew(tiny_base, tmp_path, own_cache):
    from brim.planning import training_costs as plan_cache
    from brim.storage import cache_folder

    first = train(tiny_base, tmp_path / "first")
    kept = sorted((cache_folder() / plan_cache._KIND).iterdir())
    assert len(kept) == 2  # of this budget, and of any that it fits
    for path in kept:
        path.write_text("[1, 2")
    said = []
    second = train(tiny_base, tmp_path / "second", said=said)
    assert not plan_of(second)["plan"]["from_cache"]
    assert of(first, "loss") == of(second, "loss")
    assert plan_of(train(tiny_base, tmp_path / "third"))["plan"]["from_cache"]
    assert any(line.endswith("is damaged, and is not used") for line in said)


def test_probes_and_timings_change_no_loss(tiny_base, tmp_path, monkeypatch, own_cache):
    """With dropout, whose random numbers go on where they were; the cut does not depend on times."""
    config = settings(tiny_base, trainer={"use_maximum_batch_size": True}, **DROPOUT)
    plain = train(tiny_base, tmp_path / "plain", config=config)
    assert plan_of(plain)["launch"]["probes"] == []
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", False)
    monkeypatch.setattr("brim.workflows.training.run_plan._settle_heap", lambda plan, request: [])
    monkeypatch.setattr("brim.planning.costs.timing._SHARE_OF_RUN", 1e4)
    probed = train(tiny_base, tmp_path / "probed", config=config, replan=True)
    assert len(plan_of(probed)["launch"]["probes"]) == 1
    assert "; timed " in plan_of(probed)["launch"]["told"]
    assert of(probed, "num_micro_batches") == of(plain, "num_micro_batches") == [1] * 6
    assert of(probed, "loss") == of(plain, "loss")
    assert_same_weights(plain, probed)


def test_rows_that_do_not_fit_are_named_before_anything_is_loaded_or_written(tiny_base, tmp_path, monkeypatch):
    under(monkeypatch, 300_000)
    monkeypatch.setattr("brim.workflows.training.training.load_llm", None)
    with pytest.raises(brim.InputError) as caught:
        train(tiny_base, tmp_path / "run")
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.what.startswith("rows do not fit even alone: row 23 (42 tokens")
    assert problem.fix
    assert not (tmp_path / "run").exists()


def test_a_number_of_rows_that_is_predicted_not_to_fit_is_told_and_tried(tiny_base, tmp_path, monkeypatch):
    under(monkeypatch, 200_000)
    said = []
    checkpointing = {"batch_size": 4, "enable_gradient_checkpointing": "auto"}
    run = train(tiny_base, tmp_path / "run", config=settings(tiny_base, trainer=checkpointing), said=said)
    assert any(line.startswith("plan: no way fits; ") for line in said)
    assert any(
        line.startswith("the run goes on with micro-batches of 4 rows, as trainer.batch_size says") for line in said
    )
    assert any(line.startswith("rows do not fit even alone: row ") for line in said)
    choices = {choice["key"]: choice for choice in plan_of(run)["choices"]}
    assert choices["trainer.enable_gradient_checkpointing"]["value"] is True
    assert of(run, "num_micro_batches") == [2] * 6


def test_an_architecture_that_cannot_be_traced_has_its_sizes_tried(tiny_base, tmp_path, monkeypatch):
    def untraceable(*given, **how):
        raise UntraceableError(Problem(what="Llama cannot be traced"))

    monkeypatch.setattr("brim.planning.training.traced", untraceable)
    said = []
    config = settings(tiny_base, trainer={"learning_rate": 0.011})
    run = train(tiny_base, tmp_path / "run", config=config, said=said, replan=True)
    assert "Llama cannot be traced; so batch sizes are tried out" in said
    assert plan_of(run)["plan"] is None
    assert plan_of(run)["launch"]["told"].startswith("linear: 8 of the longest rows, 42 tokens, fit together; ")
    assert of(run, "num_micro_batches") == [1] * 6


def test_a_function_that_memory_cannot_bound_is_told_where_nothing_can_be_traced(tiny_base, tmp_path, monkeypatch):
    def untraceable(*given, **how):
        raise UntraceableError(Problem(what="Llama cannot be traced"))

    monkeypatch.setattr("brim.planning.training.traced", untraceable)
    trainer = {
        "learning_rate": 0.012,
        "effective_batch_size": 4,
        "max_batch_size": 6,
        "batch_increase_function": lambda epoch, current_batch_size: 4,
    }
    said = []
    train(tiny_base, tmp_path / "run", config=settings(tiny_base, trainer=trainer), said=said, replan=True)
    assert [line for line in said if "batch_increase_function" in line] == [
        "trainer.batch_increase_function asked for 8 rows for the first epoch, and trainer.max_batch_size is 6: it was "
        "not followed, nor was 1 later",
        "the memory does not bound trainer.batch_increase_function here, since how many rows fit cannot be predicted; "
        "trainer.max_batch_size does",
    ]


@pytest.mark.parametrize("how", ["linear", "binary", "doubling", "halving"])
def test_a_search_ends_in_a_run(tiny_base, tmp_path, how):
    run = train(tiny_base, tmp_path / "run", config=settings(tiny_base, trainer={"batch_search": how, "epochs": 1}))
    assert plan_of(run)["launch"]["told"].startswith(f"{how}: 8 of the longest rows, 42 tokens, fit together; ")
    assert all(probe["outcome"] == "fits" for probe in plan_of(run)["launch"]["probes"])
    assert len(of(run, "loss")) == 3


def test_a_budget_is_enforced_in_a_run_that_goes_on_too(tiny_base, tmp_path, monkeypatch):
    enforced = []
    monkeypatch.setattr(
        "brim.workflows.training.run_plan.enforce", lambda budget, device: enforced.append(budget.limit_reason)
    )
    config = settings(tiny_base, memory={"budget": 0.9})
    parts = stopped(tiny_base, tmp_path / "parts", monkeypatch, after=1, config=config)
    assert len(enforced) == 1
    train(tiny_base, parts, config=config, resume=True)
    assert len(enforced) == 2
    train(tiny_base, tmp_path / "free")
    assert len(enforced) == 2
