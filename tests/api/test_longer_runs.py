"""A run goes on with another length where it stands as a run of that length would; else it says why, and what does."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file
from tests.api.planned_run import settings, uneven

import brim
from brim.config import load_config

DROPOUT = {"adapter": {"type": "lora", "dropout": 0.2}}
WARMUP = {"learning_rate_scheduler": {"warmup_length": "20sp"}}


def train(config, folder, *, said=None, overrides=(), **options):
    brim.Model(config, overrides=overrides).train(
        uneven(), output_directory=folder, say=(said if said is not None else []).append, **options
    )
    return folder


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("split") == "train"]


def assert_same_run(one, other):
    for name in ("loss", "learning_rate", "effective_batch_size", "num_samples", "num_micro_batches"):
        assert [step[name] for step in steps(one)] == [step[name] for step in steps(other)]
    first, second = (load_file(folder / "model" / "adapter_model.safetensors") for folder in (one, other))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


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
    key = more.partition("=")[0]
    assert any(line.startswith(f"{key} is now ") for line in said)
    totals = [json.loads((folder / "plan.json").read_text()) for folder in (parts, whole)]
    assert totals[0]["total_steps"] == totals[1]["total_steps"] == len(steps(whole))
    assert (load_config(parts / "config.yaml").config) == load_config(whole / "config.yaml").config


@pytest.mark.parametrize(
    ("begun", "more", "why"),
    [
        (
            {"epochs": 2, "learning_rate_scheduler": {"decay": "cosine"}},
            "trainer.epochs=3",
            "its learning rate depends on how long it is: that of update 2 was ",
        ),
        (
            {"epochs": 2, "learning_rate_scheduler": {"warmup_fraction": 0.5}},
            "trainer.epochs=3",
            "its learning rate depends on how long it is: that of update 1 was 0.00333333, and in a run of that length "
            "it is 0.00222222",
        ),
        (
            {"train_samples": 20},
            "trainer.train_samples=48",
            "update 3 took 4 rows, and in a run of that length it takes 8",
        ),
        (
            {"epochs": 2, "batch_rampup": "0.5dur"},
            "trainer.epochs=3",
            "update 7 took 4 rows, and in a run of that length it takes 2",
        ),
        ({"epochs": 2}, "trainer.epochs=1", "a run of that length ends after 24 samples, and 48 are consumed"),
        (
            {"epochs": 2, "batch_increase_function": lambda epoch, size: 0},
            "trainer.epochs=3",
            "trainer.batch_increase_function was asked for its epochs alone",
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
    assert f"; it cannot go on so, since {why}" in problem.what
    told, _, command = problem.fix.partition(": ")
    assert told == "set it back; or train its weights further as a run of its own"
    verb, *arguments = shlex.split(command)[1:]
    assert (verb, arguments[:3]) == ("train", [str(run / "config.yaml"), "--output-directory", f"{run}-more"])
    assert arguments[3:4] == [f"adapter.pretrained_adapter_weights={run / 'model'}"]


def test_the_command_trains_on_from_the_runs_weights(tiny_base, tmp_path):
    config = config_of(tiny_base, epochs=2, learning_rate_scheduler={"decay": "cosine"})
    run = train(config, tmp_path / "run")
    with pytest.raises(brim.ConfigError) as caught:
        train(run / "config.yaml", run, overrides=["trainer.epochs=3"], resume=True)
    _, file, _, folder, *overrides = shlex.split(caught.value.problems[0].fix.partition(": ")[2])[1:]
    assert overrides[1:] == ["trainer.epochs=1"]
    further = train(file, tmp_path / "run-more", overrides=overrides)
    assert folder == str(further)
    assert steps(further)[0]["loss"] < steps(run)[0]["loss"]
    assert len(steps(further)) == 3


def test_a_run_that_left_its_sizes_open_goes_on_with_its_own(tiny_base, tmp_path):
    """As one of an earlier version does, whose defaults were others; here their numbers stand in its checkpoint."""
    old = config_of(tiny_base, epochs=2, effective_batch_size=1)
    run = train(old, tmp_path / "run", overrides=["trainer.train_samples=5"])
    unset = {key: value for key, value in old["trainer"].items() if key not in ("epochs", "effective_batch_size")}
    said = []
    train({**old, "trainer": {**unset, "train_samples": 7}}, run, resume=True, said=said)
    assert [step["effective_batch_size"] for step in steps(run)] == [1] * 7
    assert "trainer.effective_batch_size: 1 (as the run was started)" in said
    assert load_config(run / "config.yaml").config.trainer.effective_batch_size == 1


def test_a_run_of_the_largest_batch_keeps_its_number_whatever_memory_is_there_then(tiny_base, tmp_path, monkeypatch):
    largest = {"effective_batch_size": "auto", "use_maximum_batch_size": True, "epochs": 1}
    config = config_of(tiny_base, **largest)
    run = train(config, tmp_path / "run", overrides=["trainer.max_batch_size=6"])
    assert [step["effective_batch_size"] for step in steps(run)] == [6] * 4
    said = []
    more = ["trainer.max_batch_size=6", "trainer.epochs=2", "memory.budget=4GiB"]
    train(config, run, overrides=more, resume=True, said=said)
    assert [step["effective_batch_size"] for step in steps(run)] == [6] * 8
    (told,) = (line for line in said if line.startswith("trainer.effective_batch_size"))
    assert told.startswith("trainer.effective_batch_size: 6 (use_maximum_batch_size, the largest that fits")


def test_a_run_goes_on_where_missing_cells_are_treated_otherwise_and_its_rows_are_the_same(tiny_base, tmp_path):
    """Versions differ in what they do with a missing cell where nothing is set; the rows are compared."""
    config = config_of(tiny_base, epochs=1, learning_rate_scheduler={"decay": None})
    features = {"input_features": config["input_features"], "output_features": config["output_features"]}
    error = {"preprocessing": {"missing_value_strategy": "error"}}
    old = {name: [{**feature, **error} for feature in features[name]] for name in features}
    run = train({**config, **old}, tmp_path / "run")
    said = []
    train(config, run, overrides=["trainer.epochs=2"], resume=True, said=said)
    assert len(steps(run)) == 6
    key = "output_features.0.preprocessing.missing_value_strategy"
    assert f'{key} is now "drop_row"; it was "error"' in said


def test_the_key_of_a_feature_is_named_that_a_run_may_not_be_continued_with(tiny_base, tmp_path):
    config = config_of(tiny_base, epochs=1)
    run = train(config, tmp_path / "run")
    limited = [{**config["output_features"][0], "preprocessing": {"max_sequence_length": 90}}]
    with pytest.raises(brim.ConfigError) as caught:
        train({**config, "output_features": limited}, run, resume=True)
    assert [problem.what for problem in caught.value.problems] == [
        "output_features.0.preprocessing.max_sequence_length is 90, but this run was started with null"
    ]
