"""Quantised bases through the public API: trained, evaluated on the way, stopped, continued, loaded, saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.gallery import stopped_after, usual
from tests.integration.conftest import losses

import brim

pytestmark = pytest.mark.run
ROOT = Path(__file__).parents[2]
FOUR, EIGHT = {"bits": 4}, {"bits": 8}
EACH = pytest.mark.parametrize("quantization", [FOUR, EIGHT], ids=["4 bits", "8 bits"])


def config(base, quantization, **changes):
    adapter = {"type": "lora", "dropout": 0.0, "target_modules": "all-linear"}
    return usual(base, **{"quantization": quantization, "adapter": adapter, **changes})


def untrained(base, quantization):
    return {**config(base, quantization, adapter=None), "trainer": {"type": "none"}}


def adapter(run):
    return load_file(run / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("quantization", "precision"), [(FOUR, "fp32"), (EIGHT, "fp32"), (FOUR, "bf16-true"), (EIGHT, "bf16-mixed")]
)
def test_it_learns_in_each_precision_and_the_run_opens_again(
    teachable_base, sums_file, tmp_path, quantization, precision
):
    settings = config(teachable_base, quantization, precision=precision, trainer={"epochs": 8})
    result = brim.Model(settings).train(sums_file, output_directory=tmp_path / "run")
    sequence = losses(tmp_path / "run")
    assert np.mean(sequence[-4:]) < 0.6 * np.mean(sequence[:4])  # 0.44 and less
    assert {tensor.dtype for tensor in adapter(tmp_path / "run").values()} == {torch.float32}
    opened = brim.Model.load(tmp_path / "run")
    tuned = opened.evaluate(sums_file, split="test").metrics["loss"]
    assert tuned == result.metrics["test"]["loss"]
    base = brim.Model.load(tmp_path / "run", overrides=["adapter=null"])
    assert tuned < 0.85 * base.evaluate(sums_file, split="test", batch_size=4).metrics["loss"]
    assert len(opened.predict(sums_file).predictions) == 40


@EACH
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16-true", 1e-2)])
def test_losses_do_not_depend_on_the_micro_batch(tiny_base, sums_file, tmp_path, quantization, precision, tolerance):
    """On a CPU. A GPU's 8-bit kernel sees the whole micro-batch, and is held to the tolerance of bf16."""
    sequences = []
    for rows in (1, 8):
        trainer = {"batch_size": rows, "epochs": 1}
        settings = config(tiny_base, quantization, precision=precision, trainer=trainer)
        brim.Model(settings).train(sums_file, output_directory=tmp_path / str(rows))
        sequences.append(losses(tmp_path / str(rows)))
    for other in sequences[1:]:
        np.testing.assert_allclose(other, sequences[0], rtol=tolerance)


@EACH
def test_evaluating_on_the_way_changes_nothing(tiny_base, sums_file, tmp_path, quantization):
    """bitsandbytes' evaluation kernels would repack the weights on some CPUs (see models/quantization.py)."""
    for name, changes in {"with": {"steps_per_checkpoint": 1}, "without": {"skip_all_evaluation": True}}.items():
        settings = config(tiny_base, quantization, trainer={"early_stop": -1, "epochs": 1, **changes})
        brim.Model(settings).train(sums_file, output_directory=tmp_path / name)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    last = [sorted((tmp_path / name / "checkpoints").iterdir())[-1] for name in ("with", "without")]
    assert [folder.name for folder in last] == ["step-00000004"] * 2
    assert (last[0] / "model.safetensors").read_bytes() == (last[1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("quantization", "optimizer"), [(FOUR, "adamw_8bit"), (EIGHT, "lion_8bit")])
def test_a_run_with_8_bit_states_continues_to_the_bit(tiny_base, sums_file, tmp_path, quantization, optimizer):
    trainer = {"optimizer": {"type": optimizer, "min_8bit_size": 256}, "learning_rate": 0.003, "epochs": 1}
    settings = config(tiny_base, quantization, trainer=trainer)
    settings["adapter"]["dropout"] = 0.1
    said, whole, parts = [], tmp_path / "whole", tmp_path / "parts"
    brim.Model(settings).train(sums_file, output_directory=whole, say=said.append)
    assert (
        f"{optimizer}: 4 of 28 trained weights, 512 elements in all, have fewer than 256 elements and keep 32-bit "
        "states (trainer.optimizer.min_8bit_size)"
    ) in said
    with stopped_after(2) as observer, pytest.raises(KeyboardInterrupt):
        brim.Model(settings).train(sums_file, output_directory=parts, observer=observer)
    states = load_file(parts / "checkpoints" / "step-00000002" / "optimizer.safetensors")
    assert {tensor.dtype for name, tensor in states.items() if name.endswith("state1")} == {torch.uint8, torch.float32}
    brim.Model(settings).train(sums_file, output_directory=parts, resume=True)
    assert losses(parts) == losses(whole)
    for file in ("model/adapter_model.safetensors", "checkpoints/step-00000004/optimizer.safetensors"):
        assert (parts / file).read_bytes() == (whole / file).read_bytes()


@EACH
def test_a_saved_quantised_model_opens_and_is_the_same(teachable_base, sums_file, tmp_path, quantization):
    model = brim.Model(untrained(teachable_base, quantization))
    before = model.evaluate(sums_file, split="test").rows["loss"].tolist()
    model.save(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "model" / "config.json").read_text())["quantization_config"]
    assert stored[f"load_in_{quantization['bits']}bit"] is True
    assert brim.Model.load(tmp_path / "saved").evaluate(sums_file, split="test").rows["loss"].tolist() == before
    # Its folder is a base model, too, that need not be called quantised.
    said = []
    trained = brim.Model(config(tmp_path / "saved" / "model", None))
    trained.train(sums_file, output_directory=tmp_path / "run", say=said.append)
    assert f"quantization.bits: {quantization['bits']} (as the base model is stored)" in said
    assert losses(tmp_path / "run")[-1] < 0.9 * losses(tmp_path / "run")[0]  # 0.74 and less
    assert brim.Model.load(tmp_path / "run").config.quantization.bits == quantization["bits"]


@pytest.fixture
def command(request):
    """The command line, in this process, under a name that is not the package's."""
    return request.getfixturevalue("brim")


def test_ludwigs_users_configuration_predicts_with_paths_to_local_folders(
    command, gallery, sums, tmp_path, monkeypatch
):
    """And nothing but what brim says reaches the terminal."""
    monkeypatch.chdir(tmp_path)
    trained = gallery("four_bit")
    shutil.copytree(trained.run, "run")
    questions = [{"question": row["question"]} for row in sums[:4]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "config.yaml").write_text(
        f"""\
model_type: llm
base_model: {trained.config["base_model"]}
input_features:  [{{name: question, type: text, preprocessing: {{max_sequence_length: 1024}}}}]
output_features: [{{name: answer, type: text, preprocessing: {{max_sequence_length: 384}}}}]
prompt: {{template: "Answer this question:\\n### Question: {{question}}\\n### Answer:"}}
generation: {{temperature: 0.1, max_new_tokens: 512}}
adapter: {{type: lora, pretrained_adapter_weights: run/model}}
quantization: {{bits: 4}}
preprocessing: {{split: {{type: fixed}}}}
trainer: {{type: none}}
"""
    )
    predict = ("predict", "config.yaml", "--dataset", "rows.jsonl", "--output", "out.jsonl")
    done = command(*predict, "generation.max_new_tokens=8", code=0)
    card = {"model", "data", "batch", "memory", "time", "note", "more", ""}
    assert {line[:8].strip() for line in done.err.splitlines()} <= card
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{"question": row["question"]} for row in told] == questions
    assert all(row["num_response_tokens"] <= 8 and isinstance(row["answer_response"], str) for row in told)


def test_training_prints_nothing_of_libraries(command, tiny_base, sums_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config(tiny_base, FOUR, trainer={"train_steps": 2, "optimizer": "adamw_8bit"})
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    done = command("train", "config.yaml", "--dataset", sums_file, "--output-directory", "run", "--verbose", code=0)
    kept = (tmp_path / "run" / "notes.txt").read_text().splitlines()[1:]
    assert any(line.startswith("adamw_8bit: ") for line in kept)
    assert [line for line in done.err.splitlines() if not line.startswith("step ")] == kept
