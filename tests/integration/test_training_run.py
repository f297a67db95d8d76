"""Whole runs on a tiny model: what a step means, what a run leaves behind, and that it goes on to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tests.gallery import stopped_after, usual
from tests.integration.conftest import FULL, MODEL, log, losses, steps, told, validation

import brim
from brim.train import loop as interrupt
from brim.train.checkpoints import TrainState

pytestmark = pytest.mark.run
DROPOUT = {"adapter": "lora", "trainer": {"learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.1}}}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tiny_base, gallery, tmp_path_factory):
    """A run with dropout and a schedule, and its result. Never written to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result = brim.Model(usual(tiny_base, **DROPOUT)).train(gallery("lora").data, output_directory=run, say=None)
    return run, result


def test_a_run_leaves_what_the_contract_names(whole, tiny_base):
    run, result = whole
    assert (result.output_directory, result.num_steps) == (run, 8)
    assert result.num_rows == {"train": 28, "validation": 4, "test": 8}
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "plan.json", "metrics.jsonl", "ledger.parquet", "environment.json", "checkpoints", "model",
        "README.md", "tensorboard", "notes.txt",
    }  # fmt: skip
    assert {path.name for path in (run / "model").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "manifest.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    generation = json.loads((run / "model" / "generation_config.json").read_text())  # where other tools stop
    assert generation.items() >= {"eos_token_id": [0], "pad_token_id": 1, "max_new_tokens": 6}.items()
    assert pq.read_table(run / "ledger.parquet").num_rows == 0
    assert list((run / "tensorboard").iterdir())
    assert not [p for p in run.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    card = (run / "README.md").read_text()
    assert "28" in card
    assert str(tiny_base) not in card
    records = steps(run)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert set(records[0]) == {
        "step", "split", "loss", "learning_rate", "effective_batch_size", "num_micro_batches", "num_samples",
        "num_tokens", "num_supervised_tokens", "seconds", "peak_bytes",
    }  # fmt: skip
    assert [record["effective_batch_size"] for record in records] == [8, 8, 8, 4] * 2
    assert [record["num_micro_batches"] for record in records] == [2, 2, 2, 1] * 2
    assert [record["num_samples"] for record in records] == [8, 16, 24, 28, 36, 44, 52, 56]
    assert [(r["step"], r["num_rows"]) for r in log(run) if r.get("split") == "validation"] == [(4, 4), (8, 4)]


@pytest.mark.parametrize(("piece", "tolerance"), [("lora", 1e-5), ("full", 1e-4)])
def test_losses_do_not_depend_on_the_micro_batch(train, gallery, tmp_path, piece, tolerance):
    for rows in (1, 8):
        train(str(rows), trainer={"batch_size": rows}, **(FULL if piece == "full" else {}))
        np.testing.assert_allclose(losses(tmp_path / str(rows)), losses(gallery(piece).run), rtol=tolerance)


def test_the_same_run_twice_is_equal_to_the_bit_and_activation_checkpointing_changes_nothing_but_memory(
    train, whole, tmp_path
):
    train("again", **DROPOUT)
    assert told(tmp_path / "again") == told(whole[0])
    assert (tmp_path / "again" / MODEL).read_bytes() == (whole[0] / MODEL).read_bytes()
    trainer = {**DROPOUT["trainer"], "enable_gradient_checkpointing": True}
    train("on", **{**DROPOUT, "trainer": trainer})
    assert losses(tmp_path / "on") == losses(whole[0])
    plans = [json.loads((run / "plan.json").read_text()) for run in (whole[0], tmp_path / "on")]
    assert plans[0] != plans[1]


@pytest.mark.parametrize(("method", "step"), [("lora", 1), ("lora", 4), ("lora", 7), ("full", 3)])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    train, whole, gallery, tmp_path, method, step
):
    changes, expected = (DROPOUT, whole[0]) if method == "lora" else (FULL, gallery("full").run)
    with stopped_after(step) as observer, pytest.raises(KeyboardInterrupt, match=f"stopped after step {step}"):
        train("parts", observer=observer, **changes)
    parts = tmp_path / "parts"
    assert not (parts / "model").exists()
    torch.manual_seed(999)  # another process would not have these random states either
    said = []
    train("parts", resume=True, say=said.append, **changes)
    assert any(line.startswith(f"continuing after step {step} ") for line in said)
    assert told(parts) == told(expected)
    for file in (expected / "model").glob("*.safetensors"):
        assert file.read_bytes() == (parts / "model" / file.name).read_bytes()


def test_what_only_cuts_the_batch_may_change_when_a_run_is_continued(train, gallery, tmp_path):
    parts = shutil.copytree(gallery("stopped").run, tmp_path / "parts")  # after step 3
    policies = {"split": {"type": "fixed"}, "on_bad_row": "drop", "on_overlong": "drop"}  # the rows are the same
    said = []
    trainer = {"batch_size": 2, "on_nonfinite": "skip"}
    train("parts", resume=True, say=said.append, preprocessing=policies, trainer=trainer)
    assert 'preprocessing.on_bad_row is now "drop"; it was "auto"' in said
    assert "trainer.batch_size is now 2; it was 4" in said
    assert "trainer.gradient_accumulation_steps is now 4; it was 2" in said
    assert 'trainer.on_nonfinite is now "skip"; it was "stop"' in said
    np.testing.assert_allclose(losses(parts), losses(gallery("lora").run), rtol=1e-5)
    assert [step["num_micro_batches"] for step in steps(parts)] == [2, 2, 2, 2, 4, 4, 4, 2]


def test_the_training_set_is_evaluated_apart_from_the_steps(train, tmp_path):
    train("run", trainer={"steps_per_checkpoint": 2, "evaluate_training_set": True})
    evaluated = [record for record in log(tmp_path / "run") if record.get("event") == "evaluation"]
    assert [(r["split"], r["step"], r["num_rows"]) for r in evaluated] == [("train", n, 28) for n in (2, 4, 6, 8)]


def test_early_stopping_keeps_the_best_weights_or_the_last_where_those_are_damaged(train, tmp_path):
    said, run, settings = [], tmp_path / "run", {"epochs": 30, "early_stop": 2, "learning_rate": 0.3}
    result = train("run", trainer=settings, say=said.append)
    scores, best = validation(run), result.best_step
    assert best == min(scores, key=scores.__getitem__)
    assert result.num_steps == best + 2 * 4 < 30 * 4
    assert result.metrics["validation"]["loss"] == pytest.approx(scores[best])
    assert f"kept the weights of step {best}, the best on the validation rows" in said
    (run / "checkpoints" / f"step-{best:08d}" / "model.safetensors").write_bytes(b"")
    shutil.rmtree(run / "model")
    said.clear()
    result = train("run", trainer=settings, resume=True, say=said.append)
    assert any("the weights of the last step" in line and "are kept instead of the best" in line for line in said)
    assert result.best_step == result.num_steps
    loaded = brim.Model.load(run)
    assert loaded.evaluate(tmp_path / "sums.jsonl", split="validation").metrics == result.metrics["validation"]
    # A loss that is not a number is no improvement.
    state = TrainState(step=1)
    assert not state.improve(float("nan"), higher_is_better=False)
    assert state.best_step is None
    assert state.improve(2.0, higher_is_better=False)
    assert not state.improve(float("inf"), higher_is_better=True)
    assert state.best_metric == 2.0


def test_a_model_with_dropout_of_its_own_trains_the_same_twice(train, tiny_base, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    base = shutil.copytree(tiny_base, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(base)
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)  # what happened before must not matter
        train(name, base=base, trainer={"epochs": 1}, **FULL)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "fp16-mixed"])
def test_sixteen_bits_train_and_resemble_fp32(train, gallery, tmp_path, precision):
    train("run", precision=precision)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(gallery("lora").run), rtol=2e-2)
    adapter = load_file(tmp_path / "run" / MODEL)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}


def test_a_second_ctrl_c_ends_at_once():
    with interrupt.stop_request() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            stop.wait(5)
            signal.getsignal(signal.SIGINT)


def test_a_ctrl_c_that_a_launcher_and_a_scheduler_pass_on_counts_once(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    now = [100.0]
    monkeypatch.setattr("brim.train.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    with interrupt.stop_request() as stop:
        request = signal.getsignal(signal.SIGTERM)
        for now[0] in (100.0, 100.5, 101.5):
            request(signal.SIGTERM, None)
        assert stop.is_set()
        now[0] = 110.0
        with pytest.raises(KeyboardInterrupt):
            request(signal.SIGTERM, None)


# What cannot be caught, in a process of its own: a kill


class KilledAfter:
    """An observer that kills its process once it hears of a step, which the log has by then."""

    def __init__(self, step):
        self._step = step

    def start(self, **about): ...

    def write(self, record):
        """The checkpoint of the epoch before, of four steps, is written beside training."""
        self._step_done = max(getattr(self, "_step_done", 0), record["step"])
        if record.get("event") == "checkpoint" and record["step"] == self._step // 4 * 4:
            self._is_saved = True
        if self._step_done >= self._step and getattr(self, "_is_saved", False):
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self): ...


@pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: other threads, which do nothing here
def test_killed_runs_go_on_to_the_bit(tiny_base, sums_file, tmp_path):
    unbroken, parts = tmp_path / "unbroken", tmp_path / "parts"
    config = usual(tiny_base, dataset=str(sums_file), adapter="lora", trainer={"epochs": 12, "early_stop": -1})
    brim.Model(config).train(output_directory=unbroken, say=None)
    for step in (6, 17):
        child = os.fork()
        if child == 0:
            try:
                brim.Model(config).train(output_directory=parts, resume=True, observer=KilledAfter(step), say=None)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    said = []
    brim.Model(config).train(output_directory=parts, resume=True, say=said.append)
    assert any("continuing after step 16" in line for line in said)
    assert told(parts) == told(unbroken)
    assert (parts / MODEL).read_bytes() == (unbroken / MODEL).read_bytes()
