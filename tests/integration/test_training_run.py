"""Whole runs on a tiny model: what a step means, what a run leaves behind, and that it can be continued."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import brim
from brim.train import TrainState, loop as interrupt


def config(base, **changes):
    trainer = {
        "type": "finetune",
        "epochs": 2,
        "effective_batch_size": 8,
        "batch_size": 4,
        "learning_rate": 0.01,
        "learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.1},
        **changes.pop("trainer", {}),
    }
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": "lora",
        "preprocessing": {"split": {"type": "fixed"}},
        "generation": {"max_new_tokens": 6},
        **changes,
        "trainer": trainer,
    }


def log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [record["loss"] for record in log(folder) if record.get("split") == "train"]


def without_time(records):
    return [{k: v for k, v in record.items() if k not in ("seconds", "peak_bytes")} for record in records]


FULL = {"adapter": None}
NO_DROPOUT = {"adapter": {"type": "lora", "dropout": 0.0}}


def test_a_run_leaves_what_the_contract_names(tiny_base, sums_file, tmp_path):
    result = brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run")
    run = tmp_path / "run"
    assert result.output_directory == run
    assert result.num_steps == 8
    assert result.num_rows == {"train": 28, "validation": 4, "test": 8}
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "plan.json", "metrics.jsonl", "ledger.parquet", "environment.json", "checkpoints", "model",
        "README.md", "tensorboard", "notes.txt",
    }  # fmt: skip
    assert {path.name for path in (run / "model").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "manifest.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert pq.read_table(run / "ledger.parquet").num_rows == 0
    assert list((run / "tensorboard").iterdir())
    assert not [p for p in run.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    card = (run / "README.md").read_text()
    assert "28" in card
    assert str(tiny_base) not in card


def test_metrics_have_the_fields_of_the_contract(tiny_base, sums_file, tmp_path):
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run")
    records = log(tmp_path / "run")
    steps = [record for record in records if record.get("split") == "train"]
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert set(steps[0]) == {
        "step", "split", "loss", "learning_rate", "effective_batch_size", "num_micro_batches", "num_samples",
        "num_tokens", "num_supervised_tokens", "seconds", "peak_bytes",
    }  # fmt: skip
    assert [record["effective_batch_size"] for record in steps] == [8, 8, 8, 4] * 2
    assert [record["num_micro_batches"] for record in steps] == [2, 2, 2, 1] * 2
    assert [record["num_samples"] for record in steps] == [8, 16, 24, 28, 36, 44, 52, 56]
    validation = [record for record in records if record.get("split") == "validation"]
    assert [record["step"] for record in validation] == [4, 8]
    assert validation[0]["num_rows"] == 4


@pytest.mark.parametrize(("method", "tolerance"), [(NO_DROPOUT, 1e-5), (FULL, 1e-4)], ids=["lora", "full"])
def test_losses_do_not_depend_on_the_micro_batch(tiny_base, sums_file, tmp_path, method, tolerance):
    sequences = []
    for rows in (1, 2, 8):
        run = tmp_path / str(rows)
        brim.Model(config(tiny_base, trainer={"batch_size": rows}, **method)).train(sums_file, output_directory=run)
        sequences.append(losses(run))
    for other in sequences[1:]:
        np.testing.assert_allclose(other, sequences[0], rtol=tolerance)


def test_the_same_run_twice_is_equal_to_the_bit(tiny_base, sums_file, tmp_path):
    for name in ("a", "b"):
        brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / name)
    assert without_time(log(tmp_path / "a")) == without_time(log(tmp_path / "b"))
    weights = [(tmp_path / name / "model" / "adapter_model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


class StopAfter:
    """An observer that asks for a stop after a step, as Ctrl-C would."""

    def __init__(self, step, event):
        self._step, self._event = step, event

    def start(self, *, first_step, total_steps, total_samples): ...

    def write(self, record):
        if record["step"] == self._step:
            self._event.set()

    def close(self): ...


def stop_after(step, monkeypatch):
    event = threading.Event()

    class Request:
        def __enter__(self):
            return event

        def __exit__(self, *error):
            return None

    monkeypatch.setattr("brim.workflows.training.training.stop_request", Request)
    return StopAfter(step, event)


@pytest.mark.parametrize("step", [1, 3, 4, 7])
@pytest.mark.parametrize("method", [{}, FULL], ids=["lora with dropout", "full"])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    tiny_base, sums_file, tmp_path, monkeypatch, step, method
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    brim.Model(config(tiny_base, **method)).train(sums_file, output_directory=whole)
    with monkeypatch.context() as patch:
        observer = stop_after(step, patch)
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {step}"):
            brim.Model(config(tiny_base, **method)).train(sums_file, output_directory=parts, observer=observer)
    assert not (parts / "model").exists()
    torch.manual_seed(999)  # another process would not have these random states either
    said = []
    brim.Model(config(tiny_base, **method)).train(sums_file, output_directory=parts, resume=True, say=said.append)
    assert any(line.startswith(f"continuing after step {step} ") for line in said)
    metrics = [
        [record for record in without_time(log(run)) if record.get("event") != "checkpoint"] for run in (whole, parts)
    ]
    assert metrics[0] == metrics[1]
    for file in (whole / "model").glob("*.safetensors"):
        assert file.read_bytes() == (parts / "model" / file.name).read_bytes()


def test_resume_with_nothing_to_continue_starts_anew_and_says_so(tiny_base, sums_file, tmp_path):
    said = []
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run", resume=True, say=said.append)
    assert f"nothing to continue in {tmp_path / 'run'}: the run starts anew" in said


def test_resume_with_another_configuration_names_every_change(tiny_base, sums_file, tmp_path):
    run = tmp_path / "run"
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    before = (run / "config.yaml").read_text()
    with pytest.raises(brim.ConfigError) as caught:
        brim.Model(config(tiny_base, random_seed=1, trainer={"learning_rate": 0.5})).train(
            sums_file, output_directory=run, resume=True
        )
    assert [problem.what for problem in caught.value.problems] == [
        "trainer.learning_rate is 0.5, but this run was started with 0.01",
        "random_seed is 1, but this run was started with 42",
    ]
    assert (run / "config.yaml").read_text() == before


def test_resume_with_other_rows_is_refused(tiny_base, sums, tmp_path):
    run = tmp_path / "run"
    frame = pd.DataFrame(sums)
    brim.Model(config(tiny_base)).train(frame, output_directory=run)
    frame.loc[0, "answer"] = " 99"
    with pytest.raises(brim.OutputError, match="the training or validation rows are not those that"):
        brim.Model(config(tiny_base)).train(frame, output_directory=run, resume=True)


def test_an_existing_run_is_not_touched(tiny_base, sums_file, tmp_path):
    run = tmp_path / "run"
    brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(brim.OutputError, match="there is a run in this folder already; nothing was changed"):
        brim.Model(config(tiny_base)).train(sums_file, output_directory=run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before(tiny_base, sums_file, tmp_path):
    settings = config(tiny_base, trainer={"steps_per_checkpoint": 2})
    run = tmp_path / "run"
    brim.Model(settings).train(sums_file, output_directory=run)
    whole = [record for record in without_time(log(run)) if record.get("event") != "checkpoint"]
    weights = (run / "model" / "adapter_model.safetensors").read_bytes()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())][-2:] == ["step-00000006", "step-00000008"]
    (run / "checkpoints" / "step-00000008" / "state.json").write_text("{}")
    said = []
    brim.Model(settings).train(sums_file, output_directory=run, resume=True, say=said.append)
    assert any(line.startswith("the checkpoint of step 8 is damaged (state.json changed") for line in said)
    assert any(line.startswith("continuing after step 6 ") for line in said)
    assert [record for record in without_time(log(run)) if record.get("event") != "checkpoint"] == whole
    assert (run / "model" / "adapter_model.safetensors").read_bytes() == weights


def test_a_damaged_best_checkpoint_leaves_the_last_weights(tiny_base, sums_file, tmp_path):
    run = tmp_path / "run"
    settings = config(tiny_base, trainer={"epochs": 30, "early_stop": 3, "learning_rate": 0.3})
    best = brim.Model(settings).train(sums_file, output_directory=run).best_step
    (run / "checkpoints" / f"step-{best:08d}" / "model.safetensors").write_bytes(b"")
    shutil.rmtree(run / "model")
    said = []
    result = brim.Model(settings).train(sums_file, output_directory=run, resume=True, say=said.append)
    assert any("the weights of the last step" in line and "are kept instead of the best" in line for line in said)
    assert result.best_step == result.num_steps
    assert brim.Model.load(run).evaluate(sums_file, split="validation").metrics == result.metrics["validation"]


def test_a_validation_loss_that_is_no_number_is_no_improvement():
    state = TrainState(step=1)
    assert not state.improve(float("nan"), higher_is_better=False)
    assert state.best_step is None
    assert state.improve(2.0, higher_is_better=False)
    assert not state.improve(float("inf"), higher_is_better=True)
    assert state.best_metric == 2.0


def test_what_only_cuts_the_batch_may_change_when_a_run_is_continued(tiny_base, sums_file, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    brim.Model(config(tiny_base, **NO_DROPOUT)).train(sums_file, output_directory=whole)
    with monkeypatch.context() as patch:
        observer = stop_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            brim.Model(config(tiny_base, **NO_DROPOUT)).train(sums_file, output_directory=parts, observer=observer)
    said = []
    policies = {"split": {"type": "fixed"}, "on_bad_row": "drop", "on_overlong": "drop"}  # the rows are the same
    other = config(tiny_base, trainer={"batch_size": 2}, preprocessing=policies, **NO_DROPOUT)
    brim.Model(other).train(sums_file, output_directory=parts, resume=True, say=said.append)
    assert 'preprocessing.on_bad_row is now "drop"; it was "auto"' in said
    assert "trainer.batch_size is now 2; it was 4" in said
    assert "trainer.gradient_accumulation_steps is now 4; it was 2" in said
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    assert [r["num_micro_batches"] for r in log(parts) if r.get("split") == "train"] == [2, 2, 2, 2, 4, 4, 4, 2]


def test_a_model_with_dropout_of_its_own_trains_the_same_twice(tiny_base, tmp_path, sums_file):
    from transformers import GPT2Config, GPT2LMHeadModel

    base = tmp_path / "gpt2"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_base / name, base)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=0, bos_token_id=0)
    ).save_pretrained(base)
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)  # what happened before must not matter
        brim.Model(config(base, adapter=None)).train(sums_file, output_directory=tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_the_training_rows_evaluation_stands_apart_from_the_steps(tiny_base, sums_file, tmp_path):
    run = tmp_path / "run"
    brim.Model(config(tiny_base, trainer={"evaluate_training_set": True})).train(sums_file, output_directory=run)
    evaluated = [record for record in log(run) if record.get("event") == "evaluation"]
    assert [(record["split"], record["step"], record["num_rows"]) for record in evaluated] == [
        ("train", 4, 28),
        ("train", 8, 28),
    ]


def test_an_fp16_update_that_overflowed_is_an_event(tiny_base, sums_file, tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr("torch.amp.GradScaler", lambda kind, enabled: scaler(kind, init_scale=2.0**40, enabled=enabled))
    run = tmp_path / "run"
    brim.Model(config(tiny_base, precision="fp16-mixed")).train(sums_file, output_directory=run)
    overflows = [record for record in log(run) if record.get("event") == "overflow"]
    assert overflows[0] == {"step": 1, "event": "overflow", "loss_scale": 2.0**40}


def test_early_stopping_keeps_the_best_weights(tiny_base, sums_file, tmp_path):
    run = tmp_path / "run"
    said = []
    settings = {"epochs": 30, "early_stop": 2, "learning_rate": 0.3, "learning_rate_scheduler": {}}
    result = brim.Model(config(tiny_base, trainer=settings)).train(sums_file, output_directory=run, say=said.append)
    validation = {r["step"]: r["loss"] for r in log(run) if r.get("split") == "validation"}
    assert result.num_steps < 30 * 4
    assert result.best_step == min(validation, key=validation.__getitem__)
    assert result.num_steps == result.best_step + 2 * 4
    assert result.metrics["validation"]["loss"] == pytest.approx(validation[result.best_step])
    assert f"kept the weights of step {result.best_step}, the best on the validation rows" in said


def test_a_non_finite_step_stops_before_the_update_and_names_rows(tiny_base, sums_file, tmp_path):
    settings = {"optimizer": "sgd", "learning_rate": 1.0, "gradient_clipping": None}
    base = shutil.copytree(tiny_base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    from safetensors.torch import save_file

    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(brim.BrimError, match=r"step 1 is not finite \(loss nan, gradient norm nan\); nothing was") as e:
        brim.Model(config(base, trainer=settings)).train(sums_file, output_directory=tmp_path / "run")
    assert e.value.exit_code == 1


@pytest.mark.parametrize("optimizer", ["adam", "adamw", {"type": "sgd", "momentum": 0.9}, "adafactor"])
def test_every_optimizer_lowers_the_loss(teachable_base, sums_file, tmp_path, optimizer):
    rate = 0.01 if optimizer in ("adam", "adamw") else 0.05
    settings = {"optimizer": optimizer, "learning_rate": rate, "epochs": 4, "gradient_clipping": None}
    model = brim.Model(config(teachable_base, adapter=None, trainer=settings))
    model.train(sums_file, output_directory=tmp_path / "run")
    sequence = losses(tmp_path / "run")
    assert np.mean(sequence[-4:]) < 0.6 * np.mean(sequence[:4])  # 0.44 and less


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "fp16-mixed"])
def test_sixteen_bits_train_and_resemble_fp32(tiny_base, sums_file, tmp_path, precision):
    brim.Model(config(tiny_base, **NO_DROPOUT)).train(sums_file, output_directory=tmp_path / "fp32")
    brim.Model(config(tiny_base, precision=precision, **NO_DROPOUT)).train(
        sums_file, output_directory=tmp_path / precision
    )
    np.testing.assert_allclose(losses(tmp_path / precision), losses(tmp_path / "fp32"), rtol=2e-2)
    adapter = load_file(tmp_path / precision / "model" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}


def test_activation_checkpointing_changes_nothing_but_memory(tiny_base, sums_file, tmp_path):
    for name, on in (("off", False), ("on", True)):
        settings = {"enable_gradient_checkpointing": on}
        brim.Model(config(tiny_base, trainer=settings)).train(sums_file, output_directory=tmp_path / name)
    assert losses(tmp_path / "off") == losses(tmp_path / "on")


def test_training_from_scratch_needs_no_weights(tiny_base, sums_file, tmp_path):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(brim.ModelError, match="holds no weights"):
        brim.Model(config(base, adapter=None)).train(sums_file, output_directory=tmp_path / "run")
    model = brim.Model(config(base, adapter=None, initialize="random"))
    model.train(sums_file, output_directory=tmp_path / "run")
    again = brim.Model.load(tmp_path / "run")
    assert again.evaluate(sums_file).metrics == model.evaluate(sums_file).metrics


@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "lora", "use_rslora": True, "r": 4},
        {"type": "lora", "use_dora": True},
        {"type": "lora", "target_modules": ["q_proj", "down_proj"], "bias_type": "lora_only", "alpha": 3},
        {"type": "lora", "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    ],
)
def test_lora_variants_train_and_peft_opens_them(tiny_base, sums_file, tmp_path, adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = brim.Model(config(tiny_base, adapter=adapter))
    model.train(sums_file, output_directory=tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    opened = PeftModel.from_pretrained(base, tmp_path / "run" / "model").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, model._weights().model(ids).logits)


def test_no_training_evaluates_the_splits_and_writes_nothing(tiny_base, sums_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config(tiny_base, trainer={"type": "none"})
    settings["trainer"] = {"type": "none"}
    result = brim.Model({**settings, "adapter": None}).train(sums_file)
    assert set(result.metrics) == {"validation", "test"}
    assert result.output_directory is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sums.jsonl"]


def test_a_second_ctrl_c_ends_at_once():
    import os
    import signal

    with interrupt.stop_request() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            stop.wait(5)
            signal.getsignal(signal.SIGINT)
