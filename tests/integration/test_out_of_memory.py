"""Whole runs whose memory runs out: `brim.Model` from the first row to the model folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import make_llama, make_tokenizer
from tests.integration.test_training_run import stop_after
from tests.train.scarce import apart

import brim
from brim.infer import evaluate as evaluate_module
from brim.train import checkpoint as checkpoint_module, gradient as micro_batch_pass, job as export_module

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def config(base, *, trainer=None, **changes):
    settings = {
        "type": "finetune",
        "epochs": 2,
        "effective_batch_size": 8,
        "batch_size": 4,
        "eval_batch_size": 4,
        "learning_rate": 0.01,
        **(trainer or {}),
    }
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": {"type": "fixed"}},
        "generation": {"max_new_tokens": 3},
        **changes,
        "trainer": settings,
    }


def log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [record["loss"] for record in log(folder) if record.get("split") == "train"]


def named(folder, event):
    return [record for record in log(folder) if record.get("event") == event]


class Scarce:
    """Wraps a function of a model and a batch; the device holds so many rows."""

    def __init__(self, whole, most_rows):
        self.whole, self.most_rows, self.tried = whole, most_rows, []

    def __call__(self, model, batch, **others):
        self.tried.append(len(batch.input_ids))
        if len(batch.input_ids) > self.most_rows:
            raise torch.OutOfMemoryError(OUT)
        return self.whole(model, batch, **others)


@pytest.fixture
def clean(tiny_base, sums_file, tmp_path) -> Path:
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "clean")
    return tmp_path / "clean"


def test_a_run_that_runs_out_learns_the_same_and_tells_it(tiny_base, sums_file, tmp_path, monkeypatch, clean):
    run, said = tmp_path / "run", []
    monkeypatch.setattr(micro_batch_pass, "next_token_loss", Scarce(micro_batch_pass.next_token_loss, 1))
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run, say=said.append)
    np.testing.assert_allclose(losses(run), losses(clean), rtol=1e-5)
    assert [event["step"] for event in named(run, "oom")] == [1, 1]
    assert [len(event["rows"]) for event in named(run, "oom")] == [4, 2]
    assert [(event["before"], event["after"]) for event in named(run, "cap")] == [(4, 2), (2, 1)]
    assert [event["num_micro_batches"] for event in named(run, "replay")] == [4, 8]
    assert [r["num_micro_batches"] for r in log(run) if r.get("split") == "train"] == [8, 8, 8, 4] * 2
    assert said[-1] == (
        "memory ran out 2 times in training, which was made up for: each step was made once, on all of its rows. Look "
        "for `oom` in metrics.jsonl"
    )
    before, after = (load_file(folder / "model" / "adapter_model.safetensors") for folder in (clean, run))
    assert apart(after, before) < 1e-4


def test_an_evaluation_shrinks_once_and_never_the_training_batch(tiny_base, sums_file, tmp_path, monkeypatch, clean):
    run, scarce = tmp_path / "run", Scarce(evaluate_module.next_token_scores, 2)
    monkeypatch.setattr(evaluate_module, "next_token_scores", scarce)
    result = brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    (event,) = named(run, "oom")
    assert (event["step"], event["where"], event["rows_at_once"]) == (4, "evaluation", 2)
    assert len(event["rows"]) == 4
    assert max(scarce.tried[1:]) == 2
    assert losses(run) == losses(clean)
    scores = [[r["loss"] for r in log(folder) if r.get("split") == "validation"] for folder in (clean, run)]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-5)
    assert result.metrics["validation"]["num_rows"] == 4


def test_a_row_that_cannot_be_evaluated_is_named_and_nothing_is_lost(
    tiny_base, sums_file, tmp_path, monkeypatch, clean
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "next_token_scores", Scarce(evaluate_module.next_token_scores, 0))
        with pytest.raises(brim.BrimError, match="evaluation of a single row runs out of memory") as caught:
            brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    problem = caught.value.problems[0]
    assert problem.where in {f"row {key} (numbered from 0)" for key in (7, 17, 27, 37)}
    assert problem.fix.endswith("The checkpoint of step 4 holds all that was learned")
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run, resume=True)
    timed = ("seconds", "peak_bytes")
    records = [
        [{k: v for k, v in r.items() if k not in timed} for r in log(folder) if "event" not in r]
        for folder in (run, clean)
    ]
    assert records[0] == records[1]
    model = "model/adapter_model.safetensors"
    assert (run / model).read_bytes() == (clean / model).read_bytes()


@pytest.mark.parametrize(("batch_size", "rest"), [(4, [8, 4, 8, 8, 8, 4]), (2, [4, 2, 4, 4, 4, 2])])
def test_the_limit_goes_with_the_run_unless_the_batch_size_is_another(
    tiny_base, sums_file, tmp_path, monkeypatch, clean, batch_size, rest
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(micro_batch_pass, "next_token_loss", Scarce(micro_batch_pass.next_token_loss, 1))
        observer = stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            brim.Model(config(tiny_base)).train(sums_file, output_directory=run, observer=observer)
    other = config(tiny_base, trainer={"batch_size": batch_size})
    brim.Model(other).train(sums_file, output_directory=run, resume=True)
    assert [r["num_micro_batches"] for r in log(run) if r.get("split") == "train"] == [8, 8, *rest]
    np.testing.assert_allclose(losses(run), losses(clean), rtol=1e-5)


def failing_once_or_twice(monkeypatch, module, name, num_failures):
    whole, calls = getattr(module, name), []

    def call(*given, **named_ones):
        calls.append(name)
        if len(calls) <= num_failures:
            raise MemoryError
        return whole(*given, **named_ones)

    monkeypatch.setattr(module, name, call)


def test_the_model_is_written_at_the_second_try(tiny_base, sums_file, tmp_path, monkeypatch, clean):
    failing_once_or_twice(monkeypatch, export_module, "write_manifest", 1)
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run")
    model = "model/adapter_model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (clean / model).read_bytes()


def test_a_model_that_cannot_be_written_is_in_the_checkpoints(tiny_base, sums_file, tmp_path, monkeypatch, clean):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        failing_once_or_twice(patch, export_module, "write_manifest", 2)
        with pytest.raises(brim.BrimError, match="memory ran out twice when the model was written: MemoryError"):
            brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    assert not (run / "model").exists()
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run, resume=True)
    model = "model/adapter_model.safetensors"
    assert (run / model).read_bytes() == (clean / model).read_bytes()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(tiny_base, sums_file, tmp_path, monkeypatch):
    run = tmp_path / "run"
    saves, save = [], checkpoint_module.save_file

    def scarce(tensors, path):
        saves.append(path)
        if len(saves) > 3:
            raise MemoryError
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", scarce)
        with pytest.raises(brim.BrimError, match="memory ran out twice when the checkpoint of step 8 was written"):
            brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    said = []
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run, resume=True, say=said.append)
    assert any(line.startswith("continuing after step 4 ") for line in said)


def test_predictions_and_evaluations_say_that_they_take_fewer_rows(tiny_base, sums_file):
    greedy = {"max_new_tokens": 3, "do_sample": False}
    model = brim.Model(config(tiny_base, adapter=None, generation=greedy))
    expected = model.predict(sums_file, split="test").predictions
    said = []

    def scarce(module, inputs, output):
        if len(output.last_hidden_state) > 1:
            raise torch.OutOfMemoryError(OUT)

    hook = model._weights().model.model.register_forward_hook(scarce)
    try:
        found = model.predict(sums_file, split="test", say=said.append).predictions
        evaluated = model.evaluate(sums_file, split="test", say=said.append)
    finally:
        hook.remove()
    assert found["answer_response"].tolist() == expected["answer_response"].tolist()
    assert evaluated.metrics["num_rows"] == 8
    told = [line for line in said if "ran out of memory" in line]
    assert [line.split(":")[0] for line in told] == ["generation", "generation", "evaluation", "evaluation"]
    assert told[-1].endswith("they are run again, and from now on 1 together")


REAL = """
import json, resource, sys, warnings
import brim

warnings.simplefilter("ignore")

def used_bytes():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

class Limit:
    def __init__(self, mib):
        self.num_bytes = mib << 20

    def start(self, *, first_step, total_steps, total_samples):
        if self.num_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + self.num_bytes, resource.RLIM_INFINITY))

    def write(self, record): ...

    def close(self):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

config, dataset, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
for mib in (0, 12):
    brim.Model(config).train(dataset, output_directory=f"{folder}/{mib}", observer=Limit(mib))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux alone")
def test_under_a_real_limit_training_and_evaluation_go_on_and_learn_the_same(tmp_path):
    """Limited from the first step to the end of the run to 12 MiB more than the process has then."""
    base = tmp_path / "base"
    base.mkdir()
    make_tokenizer(base)
    make_llama(base, hidden_size=64, intermediate_size=128, max_position_embeddings=512)
    data = tmp_path / "rows.jsonl"
    rows = [
        {"question": "x y " * (20 + 3 * (number % 32)), "answer": f" {number}", "split": number // 32}
        for number in range(64)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(base, trainer={"effective_batch_size": 32, "batch_size": 32, "eval_batch_size": 32})
    # Freed tensors go back to the system at once, so that the limit is on those that are alive.
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", REAL, json.dumps(settings), str(data), str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    free, limited = tmp_path / "0", tmp_path / "12"
    assert named(free, "oom") == []
    failed = named(limited, "oom")
    assert {event["where"] for event in failed} >= {"evaluation"}
    assert {event["where"] for event in failed} & {"forward", "backward"}
    assert all("can't allocate memory" in event["message"] for event in failed if "message" in event)
    np.testing.assert_allclose(losses(limited), losses(free), rtol=1e-5)
    scores = [[r["loss"] for r in log(run) if r.get("split") == "validation"] for run in (free, limited)]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-5)
    assert [r["num_samples"] for r in log(limited) if r.get("split") == "train"] == [32, 64]
