"""The same runs on a CUDA device, where there is one, and a device that runs out of memory in the middle of a step."""

import numpy as np
import pytest
import torch
from tests.gallery import usual
from tests.integration.conftest import events, losses
from torch import nn

import brim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def opens_with_its_figures(run, sums_file, result, *, tolerance):
    """A run that is loaded may be evaluated in other batches than at its end."""
    model = brim.Model.load(run)
    figures = model.evaluate(sums_file, split="test").metrics
    assert figures["loss"] == pytest.approx(result.metrics["test"]["loss"], rel=tolerance)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-mixed", "fp16-mixed"])
def test_a_gpu_gives_the_losses_of_a_cpu(tiny_base, sums_file, tmp_path, monkeypatch, precision):
    """In fp16 from a loss scale at which no update is left out: at the usual one a device may overflow, another not."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr("torch.amp.GradScaler", lambda kind, enabled: scaler(kind, init_scale=2.0**8, enabled=enabled))
    result = brim.Model(usual(tiny_base, precision=precision)).train(sums_file, output_directory=tmp_path / "gpu")
    with monkeypatch.context() as patch:
        patch.setattr("brim.session.pick_device", lambda: torch.device("cpu"))
        brim.Model(usual(tiny_base, precision="fp32")).train(sums_file, output_directory=tmp_path / "cpu")
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    assert not events(tmp_path / "gpu", "overflow")
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=tolerance)
    evaluated = 1e-5 if precision == "fp32" else 1e-3
    model = opens_with_its_figures(tmp_path / "gpu", sums_file, result, tolerance=evaluated)
    assert len(model.predict(sums_file).predictions) == 40


@pytest.mark.parametrize("optimizer", ["adam", "paged_adamw_8bit"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_on_a_gpu_gives_nearly_the_losses_of_a_cpu(
    tiny_base, sums_file, tmp_path, monkeypatch, bits, optimizer
):
    """For 8 bits the GPU's kernel is another: it quantises the activations, too."""
    settings = {**usual(tiny_base, precision="fp32"), "quantization": {"bits": bits}}
    at_home = {**settings, "trainer": {**settings["trainer"], "optimizer": optimizer.removeprefix("paged_")}}
    settings["trainer"]["optimizer"] = optimizer
    result = brim.Model(settings).train(sums_file, output_directory=tmp_path / "gpu")
    with monkeypatch.context() as patch:
        patch.setattr("brim.session.pick_device", lambda: torch.device("cpu"))
        brim.Model(at_home).train(sums_file, output_directory=tmp_path / "cpu")
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=1e-3 if bits == 4 else 1e-2)
    model = opens_with_its_figures(tmp_path / "gpu", sums_file, result, tolerance=1e-3)
    assert {weight.device.type for weight in model._weights().model.parameters()} == {"cuda"}


def test_an_8_bit_base_learns_the_same_in_other_micro_batches(tiny_base, sums_file, tmp_path):
    """LLM.int8 finds outliers in the columns of a whole micro-batch; CONTRACT.md allows 1e-2."""
    for rows in (1, 4, 8):
        settings = {**usual(tiny_base, precision="bf16-true"), "quantization": {"bits": 8}}
        settings["trainer"]["batch_size"] = rows
        brim.Model(settings).train(sums_file, output_directory=tmp_path / str(rows))
    for rows in (4, 8):
        np.testing.assert_allclose(losses(tmp_path / str(rows)), losses(tmp_path / "1"), rtol=1e-2)


def test_paged_states_are_paged_again_after_a_checkpoint():
    from brim.config import load_config
    from brim.train import build_optimizer
    from brim.train.checkpoints import optimizer_state, restore_optimizer
    from brim.train.optimizer import FixedBetas

    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "optimizer": "paged_adamw_8bit"}}
    settings = load_config(source).config.trainer.optimizer
    weights = [torch.nn.Parameter(torch.ones(512, 512, device="cuda")) for _ in range(2)]
    optimizers = [build_optimizer(settings, [weight]) for weight in weights]

    def step(index):
        FixedBetas(optimizers[index]).set(size=1, learning_rate=0.01)
        weights[index].grad = torch.linspace(-1, 1, 512 * 512, device="cuda").reshape(512, 512)
        optimizers[index].step()

    step(0)
    restore_optimizer(optimizers[1], *optimizer_state(optimizers[0]))
    weights[1].data.copy_(weights[0].data)
    assert optimizers[1].state[weights[1]]["state1"].is_paged
    step(0)
    step(1)
    assert torch.equal(weights[0], weights[1])


WIDTH, ROWS = 1 << 16, 256


def train(limit_bytes=None, max_rows=None):
    """The loss of a step, the events, and the bytes that are allocated after it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).cuda()
    rows = torch.randn(ROWS, 8)
    events = []
    step = brim.AdaptiveStep(
        model, lambda batch: model(batch.cuda()).square().sum(), max_rows=max_rows, on_event=events.append
    )
    step(rows[:4])  # cuBLAS's workspaces
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    if limit_bytes is not None:
        allowed_bytes = torch.cuda.memory_reserved() + limit_bytes
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1])
    torch.manual_seed(1)
    try:
        loss = step(rows)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return loss, events, torch.cuda.memory_allocated() - before_bytes


def test_a_step_that_runs_out_of_memory_ends_as_one_with_these_cuts():
    """A row keeps about 1.3 MB, so 256 take 340 MB."""
    loss, events, left_bytes = train(limit_bytes=160 << 20)
    max_rows = [event["after"] for event in events if event["event"] == "cap"][-1]
    assert max_rows < ROWS
    free_loss, free_events, _ = train(max_rows=max_rows)
    assert free_events == []
    assert loss == pytest.approx(free_loss, rel=1e-5)  # with dropout: the same numbers were drawn
    assert left_bytes == 0  # the gradients that were there before have been replaced
