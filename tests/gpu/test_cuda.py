"""The same runs on a CUDA device, where there is one."""

import json

import numpy as np
import pytest
import torch

import brim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def config(base, precision):
    return {
        "base_model": str(base),
        "precision": precision,
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": {"type": "fixed"}},
        "generation": {"max_new_tokens": 6, "do_sample": False},
        "trainer": {"type": "finetune", "epochs": 2, "effective_batch_size": 8, "batch_size": 4, "learning_rate": 0.01},
    }


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record.get("split") == "train"]


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-mixed", "fp16-mixed"])
def test_a_gpu_gives_the_losses_of_a_cpu(tiny_base, sums_file, tmp_path, monkeypatch, precision):
    result = brim.Model(config(tiny_base, precision)).train(sums_file, output_directory=tmp_path / "gpu")
    with monkeypatch.context() as patch:
        patch.setattr("brim.api.session.pick_device", lambda: torch.device("cpu"))
        brim.Model(config(tiny_base, "fp32")).train(sums_file, output_directory=tmp_path / "cpu")
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=tolerance)
    model = brim.Model.load(tmp_path / "gpu")
    assert model.evaluate(sums_file, split="test").metrics["loss"] == pytest.approx(result.metrics["test"]["loss"])
    assert len(model.predict(sums_file).predictions) == 40
