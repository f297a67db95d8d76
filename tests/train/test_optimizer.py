"""Optimizers: bitsandbytes' against torch's, and their 8-bit states."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from brim.config import DeviceFacts, load_config, resolve
from brim.errors import ConfigError
from brim.train import build_optimizer, restore_weights, states_in_32_bits
from brim.train.checkpoint import optimizer_state, restore_optimizer, trained_weights
from brim.train.optimizer import set_learning_rate

EIGHT_BITS = ["adam_8bit", "adamw_8bit", "lion_8bit", "sgd_8bit", "rmsprop_8bit", "adagrad_8bit"]
PAGED = ["paged_adam", "paged_adamw", "paged_lion", "paged_adam_8bit", "paged_adamw_8bit", "paged_lion_8bit"]
NEVER = 10**9  # elements from which on a state would have 8 bits


def settings(optimizer):
    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "optimizer": optimizer}}
    return load_config(source).config.trainer.optimizer


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 2))


def train(model, optimizer, *, steps, seed):
    torch.manual_seed(seed)
    set_learning_rate(optimizer, 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 24)).square().sum().backward()
        optimizer.step()


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""

    def __init__(self, parameters, lr, betas, weight_decay):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (slow, slower), lr = group["betas"], group["lr"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = (slow * momentum + (1 - slow) * weight.grad).sign() + group["weight_decay"] * weight
                weight.sub_(lr * update)
                momentum.mul_(slower).add_(weight.grad, alpha=1 - slower)


ORACLES = {
    "lion": lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    "lion_8bit": lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    # bitsandbytes' Adam takes the decay off as AdamW does.
    "adam_8bit": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd_8bit": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop_8bit": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    "adagrad_8bit": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", ORACLES)
def test_with_32_bit_states_they_are_the_usual_ones(name):
    given = {"type": name, "weight_decay": 0.1}
    models = [make(), make()]
    ours = settings(given if name == "lion" else {**given, "min_8bit_size": NEVER})
    train(models[0], build_optimizer(ours, models[0].parameters()), steps=5, seed=1)
    train(models[1], ORACLES[name](models[1].parameters()), steps=5, seed=1)
    for mine, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_states_have_8_bits_from_the_given_size_on_and_stay_near(name):
    models = [make(), make()]
    optimizers = [
        build_optimizer(settings({"type": name, "min_8bit_size": size}), model.parameters())
        for model, size in zip(models, (64, NEVER), strict=True)
    ]
    start = [weight.detach().clone() for weight in models[0].parameters()]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, steps=5, seed=1)
    dtypes = [optimizers[0].state[weight]["state1"].dtype for weight in models[0].parameters()]
    assert dtypes == [torch.uint8, torch.float32, torch.uint8, torch.float32]
    for near, exact, first in zip(models[0].parameters(), models[1].parameters(), start, strict=True):
        moved = (exact - first).norm()
        assert moved > 0
        assert (near - exact).norm() < 0.25 * moved


@pytest.mark.parametrize("name", [*EIGHT_BITS, "lion"])
def test_training_goes_on_bit_by_bit_from_states_in_a_file(name, tmp_path):
    given = settings({"type": name, "min_8bit_size": 64} if name != "lion" else name)
    model, other = make(0), make(9)
    optimizer = build_optimizer(given, model.parameters())
    train(model, optimizer, steps=3, seed=1)
    tensors, numbers = optimizer_state(optimizer)
    save_file(tensors, tmp_path / "optimizer.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(numbers))
    restore_weights(other, {key: value.clone() for key, value in trained_weights(model).items()})
    continued = build_optimizer(given, other.parameters())
    restore_optimizer(
        continued, load_file(tmp_path / "optimizer.safetensors"), json.loads((tmp_path / "state.json").read_text())
    )
    train(model, optimizer, steps=3, seed=2)
    train(other, continued, steps=3, seed=2)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual)
    ours, theirs = optimizer_state(optimizer), optimizer_state(continued)
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(tensor, theirs[0][key]) for key, tensor in ours[0].items())


def test_weights_that_keep_32_bit_states_are_counted():
    weights = list(make().parameters())  # 768, 32, 64 and 2 elements
    assert states_in_32_bits(settings({"type": "adamw_8bit", "min_8bit_size": 64}), weights) == (
        "adamw_8bit: 2 of 4 trained weights, 34 elements in all, have fewer than 64 elements and keep 32-bit states "
        "(trainer.optimizer.min_8bit_size)"
    )
    assert states_in_32_bits(settings({"type": "adamw_8bit", "min_8bit_size": 2}), weights) is None
    assert states_in_32_bits(settings("adamw"), weights) is None


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize(("kind", "machine"), [("cpu", "CPU"), ("mps", "mps")])
def test_paged_states_are_refused_where_there_are_none(name, kind, machine):
    config = load_config(
        {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "optimizer": name}}
    ).config
    with pytest.raises(ConfigError) as caught:
        resolve(config, DeviceFacts(kind=kind, bf16=False))
    assert str(caught.value) == (
        f"trainer.optimizer.type: trainer.optimizer {name} needs a CUDA device, and this is a {machine} machine\n"
        f"  fix: set trainer.optimizer.type: {name.removeprefix('paged_')}"
    )
    assert resolve(config, DeviceFacts(kind="cuda", bf16=True)).config.trainer.optimizer.type == name
    assert settings(name.removeprefix("paged_"))
