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


@pytest.mark.parametrize("optimizer", ["adam", "paged_adamw_8bit"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_on_a_gpu_gives_nearly_the_losses_of_a_cpu(
    tiny_base, sums_file, tmp_path, monkeypatch, bits, optimizer
):
    """For 8 bits the GPU's kernel is another: it quantises the activations, too."""
    settings = {**config(tiny_base, "fp32"), "quantization": {"bits": bits}}
    at_home = {**settings, "trainer": {**settings["trainer"], "optimizer": optimizer.removeprefix("paged_")}}
    settings["trainer"]["optimizer"] = optimizer
    result = brim.Model(settings).train(sums_file, output_directory=tmp_path / "gpu")
    with monkeypatch.context() as patch:
        patch.setattr("brim.api.session.pick_device", lambda: torch.device("cpu"))
        brim.Model(at_home).train(sums_file, output_directory=tmp_path / "cpu")
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=1e-3 if bits == 4 else 1e-2)
    model = brim.Model.load(tmp_path / "gpu")
    assert model.evaluate(sums_file, split="test").metrics["loss"] == pytest.approx(result.metrics["test"]["loss"])
    assert {weight.device.type for weight in model._weights().model.parameters()} == {"cuda"}


def test_an_8_bit_base_learns_the_same_in_other_micro_batches(tiny_base, sums_file, tmp_path):
    """LLM.int8 finds outliers in the columns of a whole micro-batch; CONTRACT.md allows 1e-2."""
    for rows in (1, 4, 8):
        settings = {**config(tiny_base, "bf16-true"), "quantization": {"bits": 8}}
        settings["trainer"]["batch_size"] = rows
        brim.Model(settings).train(sums_file, output_directory=tmp_path / str(rows))
    for rows in (4, 8):
        np.testing.assert_allclose(losses(tmp_path / str(rows)), losses(tmp_path / "1"), rtol=1e-2)


def test_paged_states_are_paged_again_after_a_checkpoint():
    from brim.config import load_config
    from brim.train.optimizer import build_optimizer, set_learning_rate
    from brim.train.tensors import optimizer_state, restore_optimizer

    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "optimizer": "paged_adamw_8bit"}}
    settings = load_config(source).config.trainer.optimizer
    weights = [torch.nn.Parameter(torch.ones(512, 512, device="cuda")) for _ in range(2)]
    optimizers = [build_optimizer(settings, [weight]) for weight in weights]

    def step(index):
        set_learning_rate(optimizers[index], 0.01)
        weights[index].grad = torch.linspace(-1, 1, 512 * 512, device="cuda").reshape(512, 512)
        optimizers[index].step()

    step(0)
    restore_optimizer(optimizers[1], *optimizer_state(optimizers[0]))
    weights[1].data.copy_(weights[0].data)
    assert optimizers[1].state[weights[1]]["state1"].is_paged
    step(0)
    step(1)
    assert torch.equal(weights[0], weights[1])
