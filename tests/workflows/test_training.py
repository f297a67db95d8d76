"""How a run partitions its batches from its first step to its last: stopped, continued, made longer and run again."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import make_llama, make_tokenizer
from tests.gallery import sums
from tests.integration.conftest import steps, told
from tests.workflows.planned_run import assert_same_weights, of, plan_of, settings, stopped, train

import brim
from brim.config import load_config
from brim.errors import Problem
from brim.memory import UntraceableError
from brim.memory.devices import Budget
from brim.units import format_bytes
from brim.workflows.training import resuming
from brim.workflows.training.training import states_in_32_bits

pytestmark = pytest.mark.run
DROPOUT = {"adapter": {"type": "lora", "dropout": 0.2}}
FIGURES = ("loss", "learning_rate", "effective_batch_size", "num_samples", "num_tokens", "num_micro_batches")


@pytest.fixture
def own_cache(tmp_path, monkeypatch, tiny_base):
    """Plans of its own; traces are those of all."""
    monkeypatch.setattr("brim.planning.plan_cache._KIND", f"plans of {tmp_path.name}")
    monkeypatch.setattr("brim.planning.costs.time._KIND", f"calibrations of {tmp_path.name}")


def under(monkeypatch, reserved_bytes):
    """So much for weights, gradients, state and micro-batches, and nothing else."""
    reasons = {"limit_reason": "as tested", "margin_reason": "as tested"}
    budget = Budget(device="cpu", limit_bytes=reserved_bytes, outside_bytes=0, margin_bytes=0, **reasons)
    monkeypatch.setattr("brim.planning.request.budget_of", lambda *given, **how: budget)
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", True)  # what this process takes is not the plan's


def assert_same_run(one, other):
    for name in FIGURES:
        assert of(one, name) == of(other, name)
    assert_same_weights(one, other)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16-mixed", 1e-2)])
def test_a_budget_decides_the_partition_and_not_the_losses(tiny_base, tmp_path, monkeypatch, precision, tolerance):
    config, notes = settings(tiny_base, precision=precision), []
    whole = train(config, tmp_path / "whole")
    under(monkeypatch, 600_000)
    small = train(config, tmp_path / "small", said=notes)
    assert sum(of(small, "num_micro_batches")) > sum(of(whole, "num_micro_batches"))
    np.testing.assert_allclose(of(small, "loss"), of(whole, "loss"), rtol=tolerance)
    plan = plan_of(small)["plan"]
    assert plan["budget"]["limit_bytes"] == plan["chosen"]["cap_bytes"] == 600_000
    assert plan["chosen"]["cap_binds"]
    last = max((small / "checkpoints").iterdir())
    weights, state = (load_file(last / f"{name}.safetensors") for name in ("model", "optimizer"))
    saved_bytes = sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))
    assert plan["saved_bytes"] == saved_bytes - 4 * len(weights)  # Adam's numbers of steps
    left_bytes = 600_000 - plan["chosen"]["total_bytes"]
    does = "goes on" if left_bytes >= plan["saved_bytes"] else "stands still"
    (note,) = (note for note in notes if note.startswith("training ") and "checkpoint is written" in note)
    assert (note.startswith(f"training {does} while"), f" {format_bytes(left_bytes)} are free" in note) == (True, True)


def test_a_run_that_goes_on_keeps_its_plan_and_its_partition_to_the_bit(tiny_base, tmp_path, monkeypatch):
    under(monkeypatch, 600_000)
    config = settings(tiny_base, trainer={"enable_gradient_checkpointing": "auto"}, **DROPOUT)
    whole = train(config, tmp_path / "whole")
    parts = stopped(config, tmp_path / "parts", after=1)
    before = (parts / "plan.json").read_bytes()
    monkeypatch.setattr("brim.workflows.training.planning.plan_run", None)  # it is not planned, nor tried
    monkeypatch.setattr("brim.workflows.training.planning.launch", None)
    stopped(config, parts, after=4, resume=True)
    train(config, parts, resume=True)
    assert (parts / "plan.json").read_bytes() == before
    assert_same_run(parts, whole)


def test_as_few_layers_are_recomputed_as_fit_and_the_losses_are_the_same(tmp_path, monkeypatch):
    make_llama(tmp_path / "base", num_hidden_layers=6)
    make_tokenizer(tmp_path / "base")

    def config(layers):
        trainer = {"batch_size": 4, "chunked_loss": False, "packing": False, "enable_gradient_checkpointing": layers}
        return settings(tmp_path / "base", trainer=trainer)

    needed = brim.predict_memory(config(3), sequence_length=42, device="cpu").allocated_bytes
    whole = train(config(False), tmp_path / "whole")
    under(monkeypatch, round(1.005 * needed))
    parts = stopped(config("auto"), tmp_path / "parts", after=2)
    before = (parts / "plan.json").read_bytes()
    (choice,) = (each for each in plan_of(parts)["choices"] if each["key"] == "trainer.enable_gradient_checkpointing")
    assert choice["value"] == plan_of(parts)["plan"]["chosen"]["way"]["gradient_checkpointing"] == 3
    assert choice["reason"].startswith("recomputes 3 of 6 layers, fills ")
    assert plan_of(parts)["plan"]["chosen"]["total_bytes"] == pytest.approx(needed, rel=5e-3)
    train(config("auto"), parts, resume=True)
    assert (parts / "plan.json").read_bytes() == before
    assert of(parts, "loss") == of(whole, "loss")


@pytest.fixture(scope="module")
def stopping_early(tiny_base):
    """Dropout, and a run that is best at step 4: three evaluations later it ends, after step 10."""
    trainer = {"epochs": 30, "batch_size": 4, "learning_rate": 0.3, "steps_per_checkpoint": 2, "early_stop": 3}
    config = settings(tiny_base, adapter={"type": "lora", "dropout": 0.1})
    return {**config, "trainer": {"type": "finetune", **trainer}}


def test_a_run_that_stops_early_is_the_same_wherever_it_was_interrupted(stopping_early, tmp_path):
    """Once after each step, and once amid its steps."""
    rows, results = pd.DataFrame(sums()), {}
    for name, stops in {"whole": (), "after each": range(1, 10), "once": (3,)}.items():
        for after in stops:
            stopped(stopping_early, tmp_path / name, after=after, data=rows, resume=after > stops[0])
        results[name] = brim.Model(stopping_early).train(
            rows, output_directory=tmp_path / name, resume=bool(stops), say=None
        )
    whole = results.pop("whole")
    assert (whole.num_steps, whole.best_step) == (10, 4)
    for name, result in results.items():
        assert (result.num_steps, result.best_step, result.metrics) == (10, 4, whole.metrics)
        assert told(tmp_path / name) == told(tmp_path / "whole")
        assert_same_weights(tmp_path / name, tmp_path / "whole")


def test_where_whole_logits_are_faster_the_run_has_no_chunks(tiny_base, tmp_path, monkeypatch, own_cache):
    under(monkeypatch, 600_000)
    taken = []

    def the_second(candidates, *, has_more):
        taken.append(candidates[1].way)
        return candidates[1], "as tested"

    monkeypatch.setattr("brim.planning.training.choose", the_second)
    config = settings(tiny_base)
    parts = stopped(config, tmp_path / "parts", after=2)
    assert [way.chunked_loss for way in taken] == [False]
    before = (parts / "plan.json").read_bytes()
    assert {"key": "trainer.chunked_loss", "value": False, "reason": "as tested"} in plan_of(parts)["choices"]
    assert "chunked_loss: false" in (parts / "config.yaml").read_text()
    train(config, parts, resume=True)
    assert (parts / "plan.json").read_bytes() == before


def test_a_run_that_goes_on_under_less_memory_is_planned_again_and_learns_the_same(tiny_base, tmp_path, monkeypatch):
    under(monkeypatch, 10_000_000)
    config = settings(tiny_base, trainer={"enable_gradient_checkpointing": "auto"})
    whole = train(config, tmp_path / "whole")
    parts = stopped(config, tmp_path / "parts", after=3)
    under(monkeypatch, 600_000)
    said = []
    train(config, parts, resume=True, said=said)
    assert "there is less memory than when the run was planned, so it is planned again" in said
    assert plan_of(parts)["plan"]["budget"]["limit_bytes"] == 600_000
    cuts, before = of(parts, "num_micro_batches"), of(whole, "num_micro_batches")
    assert cuts[:3] == before[:3]
    assert sum(cuts[3:]) > sum(before[3:])
    for name in ("effective_batch_size", "num_tokens", "num_samples", "learning_rate"):
        assert of(parts, name) == of(whole, name)
    np.testing.assert_allclose(of(parts, "loss"), of(whole, "loss"), rtol=1e-5)


def test_a_run_that_goes_on_with_another_budget_or_replan_is_planned_again(tiny_base, tmp_path):
    parts, said = stopped(settings(tiny_base), tmp_path / "parts", after=2), []
    other = settings(tiny_base, memory={"margin": "64 MiB"})
    stopped(other, parts, after=3, resume=True, said=said)
    assert 'memory.margin is now "64 MiB"; it was "auto"' in said
    assert plan_of(parts)["plan"]["budget"]["margin_bytes"] == 64 * 2**20
    said.clear()
    train(other, parts, resume=True, replan=True, said=said)
    assert any(line.startswith("batch: ") and "found earlier" not in line for line in said)


def test_a_damaged_plan_of_a_run_is_made_again(tiny_base, tmp_path):
    config = settings(tiny_base)
    whole = train(config, tmp_path / "whole")
    parts = stopped(config, tmp_path / "parts", after=2)
    for number, content in enumerate(["{", '{"plan": {"chosen": 3}, "launch": {}}', '{"plan": [], "launch": {}}']):
        damaged = shutil.copytree(parts, tmp_path / f"damaged-{number}")
        (damaged / "plan.json").write_text(content)
        train(config, damaged, resume=True)
        assert plan_of(damaged)["plan"]["chosen"]["widest"] == plan_of(whole)["plan"]["chosen"]["widest"]
        assert of(damaged, "loss") == of(whole, "loss")


def test_a_second_run_is_the_first_to_the_bit_although_that_one_measured(tiny_base, tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr("brim.workflows.training.timing._SHARE_OF_RUN", 1e4)
    config = settings(tiny_base, **DROPOUT)
    first, second = (train(config, tmp_path / name) for name in ("first", "second"))
    plans = [plan_of(folder) for folder in (first, second)]
    assert "; timed " in plans[0]["launch"]["told"]
    assert plans[1]["launch"]["told"].endswith("; timed by an earlier run")
    assert [plan["plan"]["from_cache"] for plan in plans] == [False, True]
    assert plans[0]["plan"]["costs"] == plans[1]["plan"]["costs"]
    assert plans[0]["plan"]["chosen"]["time_source"] == "measured"
    assert_same_run(first, second)


def test_probes_and_timings_change_no_loss(tiny_base, tmp_path, monkeypatch, own_cache):
    """With dropout, whose random numbers go on where they were; the partition does not depend on times."""
    config = settings(tiny_base, trainer={"use_maximum_batch_size": True}, **DROPOUT)
    plain = train(config, tmp_path / "plain")
    assert plan_of(plain)["launch"]["probes"] == []
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", False)
    monkeypatch.setattr("brim.workflows.training.planning._settle_heap", lambda plan, request: [])
    monkeypatch.setattr("brim.workflows.training.timing._SHARE_OF_RUN", 1e4)
    probed = train(config, tmp_path / "probed", replan=True)
    assert len(plan_of(probed)["launch"]["probes"]) == 1
    assert "; timed " in plan_of(probed)["launch"]["told"]
    assert of(probed, "num_micro_batches") == [1] * 6
    assert_same_run(plain, probed)


def test_rows_that_do_not_fit_are_named_before_anything_is_loaded_unless_their_number_was_asked_for(
    tiny_base, tmp_path, monkeypatch
):
    under(monkeypatch, 300_000)
    with monkeypatch.context() as patch, pytest.raises(brim.InputError) as caught:
        patch.setattr("brim.workflows.training.sharding.load_llm", None)
        train(settings(tiny_base), tmp_path / "run")
    (problem,) = caught.value.problems
    assert problem.what.startswith("rows do not fit even alone: row 23 (42 tokens")
    assert not (tmp_path / "run").exists()
    under(monkeypatch, 200_000)
    said = []
    checkpointing = {"batch_size": 4, "enable_gradient_checkpointing": "auto"}
    run = train(settings(tiny_base, trainer=checkpointing), tmp_path / "run", said=said)
    as_asked = "the run takes micro-batches of 4 rows, as trainer.batch_size says"
    for beginning in ("batch: no strategy fits; ", as_asked, "rows do not fit even alone: row "):
        assert any(line.startswith(beginning) for line in said)
    choices = {choice["key"]: choice for choice in plan_of(run)["choices"]}
    assert choices["trainer.enable_gradient_checkpointing"]["value"] is True
    assert of(run, "num_micro_batches") == [2] * 6


def test_an_architecture_that_cannot_be_traced_has_its_sizes_tried(tiny_base, tmp_path, monkeypatch):
    """Memory, which cannot be predicted, bounds no function then."""
    untraceable = UntraceableError(Problem(what="Llama cannot be traced"))
    monkeypatch.setattr("brim.planning.training.traced", Mock(side_effect=untraceable))
    said = []
    config = settings(tiny_base, trainer={"learning_rate": 0.011})
    run = train(config, tmp_path / "run", said=said, replan=True)
    assert "batch: Llama cannot be traced; so batch sizes are tried out" in said
    assert plan_of(run)["plan"] is None
    assert plan_of(run)["launch"]["told"].startswith("linear: 8 of the longest rows, 42 tokens, fit together; ")
    assert of(run, "num_micro_batches") == [1] * 6
    said.clear()
    function = {"batch_increase_function": lambda epoch, current_batch_size: 4}
    trainer = {"learning_rate": 0.012, "effective_batch_size": 4, "max_batch_size": 6, **function}
    train(settings(tiny_base, trainer=trainer), tmp_path / "grows", said=said, replan=True)
    _, bounded = (line for line in said if "batch_increase_function" in line)
    assert bounded.startswith("the memory does not bound trainer.batch_increase_function here")


def test_a_budget_is_enforced_in_a_run_that_goes_on_too(tiny_base, tmp_path, monkeypatch):
    enforced = []
    monkeypatch.setattr("brim.planning.request.enforce", lambda budget, device: enforced.append(budget.limit_reason))
    config = settings(tiny_base, memory={"budget": 0.9}, trainer={"epochs": 1})
    parts = stopped(config, tmp_path / "parts", after=1)
    assert len(enforced) == 1
    train(config, parts, resume=True)
    assert len(enforced) == 2
    train(settings(tiny_base, trainer={"epochs": 1}), tmp_path / "free")
    assert len(enforced) == 2


WARMUP = {"learning_rate_scheduler": {"warmup_length": "20sp"}}


def config_of(base, **trainer):
    return settings(base, trainer={"chunked_loss": False, **trainer}, memory={"budget": "2GiB"}, **DROPOUT)


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        ({"epochs": 2, **WARMUP}, "trainer.epochs=3"),
        ({"train_steps": 3}, "trainer.train_steps=5"),
        ({"train_samples": 32, "batch_rampup": {"length": "16sp", "from": 4}}, "trainer.train_samples=48"),
        ({"epochs": 1, "learning_rate_scheduler": {"decay": "wsd", "decay_fraction": 0.0}}, "trainer.train_samples=40"),
    ],
)
def test_a_finished_run_goes_on_as_one_that_was_started_with_that_length(tiny_base, tmp_path, begun, more):
    said, config = [], config_of(tiny_base, **begun)
    parts = train(config, tmp_path / "parts")
    before = len(steps(parts))
    train(parts / "config.yaml", parts, overrides=[more], resume=True, said=said)
    whole = train(config, tmp_path / "whole", overrides=[more])
    assert len(steps(parts)) > before
    assert_same_run(parts, whole)
    assert any(line.startswith(f"{more.partition('=')[0]} is now ") for line in said)
    assert plan_of(parts)["total_steps"] == plan_of(whole)["total_steps"] == len(steps(whole))
    assert load_config(parts / "config.yaml").config == load_config(whole / "config.yaml").config


LONGER = "trainer.epochs=3"
FUNCTION = "trainer.batch_increase_function"
RATES = "its learning rate depends on how long it is: that of update 1 was 0.00333333, and in a run of that length it is 0.00222222"


@pytest.mark.parametrize(
    ("begun", "more", "why"),
    [
        ({"epochs": 2, "learning_rate_scheduler": {"warmup_fraction": 0.5}}, LONGER, RATES),
        ({"train_samples": 20}, "trainer.train_samples=48", "update 3 took 4 rows, and in a run of that length"),
        ({"epochs": 2, "batch_rampup": "0.5dur"}, LONGER, "update 7 took 4 rows, and in a run of that length"),
        ({"epochs": 2}, "trainer.epochs=1", "a run of that length ends after 24 samples, and 48 are consumed"),
        (
            {"epochs": 2, "batch_increase_function": lambda epoch, size: 0},
            LONGER,
            f"{FUNCTION} was called for the first",
        ),
    ],
)
def test_where_it_does_not_one_message_says_why_and_which_command_does(tiny_base, tmp_path, begun, more, why):
    config = config_of(tiny_base, **begun)
    run = train(config, tmp_path / "run")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(brim.ConfigError) as caught:
        train(config, run, overrides=[more], resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    (problem,) = caught.value.problems
    key, _, value = more.partition("=")
    assert problem.what.startswith(f"{key} is {value}, but this run was started with ")
    assert f"; it cannot continue so, since {why}" in problem.what
    fix, _, command = problem.fix.partition(": ")
    assert fix == "set it back; or train its weights further as a run of its own"
    verb, file, _, folder, *overrides = shlex.split(command)[1:]
    assert (verb, file, folder) == ("train", str(run / "config.yaml"), f"{run}-more")
    assert overrides[0] == f"adapter.pretrained_adapter_weights={run / 'model'}"
    if "warmup_fraction" not in str(begun):
        return
    assert overrides[1:] == ["trainer.epochs=1"]
    further = train(file, Path(folder), overrides=overrides)
    assert steps(further)[0]["loss"] < steps(run)[0]["loss"]
    assert len(steps(further)) == 3


def test_a_run_that_left_its_sizes_open_goes_on_with_its_own(tiny_base, tmp_path):
    """As one of an earlier version does, whose defaults were others; here their numbers stand in its checkpoint."""
    old = config_of(tiny_base, epochs=2, effective_batch_size=1)
    run = train(old, tmp_path / "run", overrides=["trainer.train_samples=5"])
    unset = {key: value for key, value in old["trainer"].items() if key not in ("epochs", "effective_batch_size")}
    said = []
    train({**old, "trainer": {**unset, "train_samples": 7}}, run, resume=True, said=said)
    assert of(run, "effective_batch_size") == [1] * 7
    assert "trainer.effective_batch_size: 1 (as the run was started)" in said
    assert load_config(run / "config.yaml").config.trainer.effective_batch_size == 1


def test_a_run_begun_with_kernels_that_are_not_here_goes_on_without_and_says_so(tiny_base, tmp_path, monkeypatch):
    config = config_of(tiny_base, epochs=2, effective_batch_size=1)
    run = train(config, tmp_path / "run", overrides=["trainer.train_samples=5"])
    before = resuming._settings_of
    said = []
    train(config, run, overrides=["trainer.train_samples=6"], resume=True)
    choices = json.loads((run / "plan.json").read_text())["choices"]
    assert "auto" not in [choice["value"] for choice in choices]

    def begun_with_liger(checkpoint):
        checkpoint.state["settings"]["model_parameters"]["kernels"] = "liger"
        return before(checkpoint)

    monkeypatch.setattr(resuming, "_settings_of", begun_with_liger)
    train(config, run, overrides=["trainer.train_samples=7"], resume=True, said=said)
    told = "model_parameters.kernels: the run was begun with liger, and goes on without (the device is no GPU)"
    assert told in said
    assert any(line.startswith("batch: ") for line in said), "it is planned again"


def test_weights_that_keep_32_bit_states_are_counted(tiny_base):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (64, 32, 128, 2)]
    for optimizer, line in (
        (
            {"type": "adamw_8bit", "min_8bit_size": 64},
            "adamw_8bit: 2 of 4 trained weights, 34 elements in all, have fewer than 64 elements and keep 32-bit "
            "states (trainer.optimizer.min_8bit_size)",
        ),
        ({"type": "adamw_8bit", "min_8bit_size": 2}, None),
        ("adamw", None),
    ):
        trainer = load_config(config_of(tiny_base, optimizer=optimizer)).config.trainer
        assert states_in_32_bits(trainer.optimizer, parameters) == line


def test_a_run_of_the_largest_batch_keeps_its_number_whatever_memory_is_there_then(tiny_base, tmp_path):
    config = config_of(tiny_base, effective_batch_size="auto", use_maximum_batch_size=True, epochs=1)
    run = train(config, tmp_path / "run", overrides=["trainer.max_batch_size=6"])
    assert of(run, "effective_batch_size") == [6] * 4
    said = []
    more = ["trainer.max_batch_size=6", "trainer.epochs=2", "memory.budget=4GiB"]
    train(config, run, overrides=more, resume=True, said=said)
    assert of(run, "effective_batch_size") == [6] * 8
    (line,) = (line for line in said if line.startswith("trainer.effective_batch_size"))
    assert line.startswith("trainer.effective_batch_size: 6 (use_maximum_batch_size, the largest that fits")


def test_a_run_goes_on_where_missing_cells_are_treated_otherwise_and_its_rows_are_the_same(tiny_base, tmp_path):
    """Versions differ in what they do with a missing cell where nothing is set; the rows are compared."""
    config = config_of(tiny_base, epochs=1, learning_rate_scheduler={"decay": None})
    error = {"preprocessing": {"missing_value_strategy": "error"}}
    old = {name: [{**each, **error} for each in config[name]] for name in ("input_features", "output_features")}
    run, said = train({**config, **old}, tmp_path / "run"), []
    limited = [{**config["output_features"][0], "preprocessing": {"max_sequence_length": 90}}]
    with pytest.raises(brim.ConfigError, match=r"0\.preprocessing\.max_sequence_length is 90, but this run was"):
        train({**config, "output_features": limited}, run, resume=True)
    train(config, run, overrides=["trainer.epochs=2"], resume=True, said=said)
    assert len(steps(run)) == 6
    key = "output_features.0.preprocessing.missing_value_strategy"
    assert f'{key} is now "drop_row"; it was "error"' in said
