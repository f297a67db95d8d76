"""What an earlier version left on disk: a run, one that was stopped, a prediction half done, their cache.

They lie in tests/data/made_by_59795c4, whose README says how they were made. Where this machine computes otherwise than
the one that made them, figures are close and texts are equal: the model is sure of each of its words.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file
from tests.integration.conftest import log

import brim

MADE = Path(__file__).parents[1] / "data" / "made_by_59795c4"
STOPPED_AFTER, NUM_STEPS = 56, 64
NUM_DONE, NUM_ROWS = 16, 40
CLOSE = {"rel": 1e-4}  # as in CONTRACT.md, of fp32 losses
MEASURED = ("loss", "perplexity", "seconds", "peak_bytes")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The current folder: a copy of what was made, somewhere else than where it was made."""
    folder = shutil.copytree(MADE, tmp_path / "made")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def rows(made):
    return pd.read_json(made / "rows.jsonl", lines=True)


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def all_losses(records):
    return [record["loss"] for record in records if "loss" in record]


def exact(records):
    """What no machine may change: steps, rows, tokens, sizes, learning rates, and which tokens are right."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def test_a_finished_run_loads_evaluates_and_predicts_as_it_did(made, rows):
    before = digests(made / "run")
    run = brim.Model.load("run")
    metrics = run.evaluate(rows, split="test").metrics
    assert metrics == pytest.approx(json.loads((made / "evaluated.json").read_text()), **CLOSE)
    predictions = run.predict(rows).predictions
    whole = pd.read_json(made / "whole.jsonl", lines=True)
    assert list(predictions["answer_response"]) == list(whole["answer_response"]) == list(rows["answer"])
    assert digests(made / "run") == before


def test_a_stopped_run_ends_as_the_one_that_was_not(made, rows):
    already = (made / "stopped" / "metrics.jsonl").read_text()
    said = []
    brim.Model("stopped/config.yaml").train(rows, output_directory="stopped", resume=True, say=said.append)
    assert any(f"continuing after step {STOPPED_AFTER} " in line for line in said)
    assert (made / "stopped" / "metrics.jsonl").read_text().startswith(already)
    new = log(made / "stopped")[len(already.splitlines()) :]
    expected = [record for record in log(made / "run") if record["step"] > STOPPED_AFTER]
    assert [r["step"] for r in new if r.get("split") == "train"] == list(range(STOPPED_AFTER + 1, NUM_STEPS + 1))
    assert exact(new) == exact(expected)
    assert all_losses(new) == pytest.approx(all_losses(expected), **CLOSE)
    weights, ends = (load_file(made / name / "model" / "adapter_model.safetensors") for name in ("stopped", "run"))
    assert weights.keys() == ends.keys()
    for name, tensor in weights.items():
        assert tensor == pytest.approx(ends[name], rel=1e-3, abs=1e-4), name


def test_a_prediction_half_done_ends_in_the_same_file(made):
    said, generated = [], []
    brim.Model.load("run").predict(
        "rows.jsonl", output="half.jsonl", resume=True, say=said.append, on_batch=generated.append
    )
    assert f"continuing: {NUM_DONE} of {NUM_ROWS} rows are done" in said
    assert (generated[0], sum(generated)) == (NUM_DONE, NUM_ROWS)
    assert (made / "half.jsonl").read_bytes() == (made / "whole.jsonl").read_bytes()
    before, after = (json.loads((made / f"{name}.jsonl.summary.json").read_text()) for name in ("whole", "half"))
    assert after["num_resumed"] == 1
    for key in ("num_rows", "num_prompt_tokens", "num_response_tokens", "finish_reasons"):
        assert after[key] == before[key]


def test_an_old_cache_changes_nothing(made, rows, monkeypatch):
    """An entry's name says which code made it, and this version asks for others."""

    def train(cache):
        monkeypatch.setenv("BRIM_CACHE_DIR", str(cache))
        run = made / f"with {cache.name}"
        model = brim.Model("config.yaml", overrides=["trainer.train_steps=2"])
        model.train(rows, output_directory=run, say=None)
        return exact(log(run)), all_losses(log(run))

    assert train(made / "cache") == train(made / "none")
