"""A run's state as tensors, and back."""

import pytest
import torch
from torch import nn

from brim.train import restore_weights
from brim.train.checkpoint import optimizer_state, restore_optimizer, trained_weights

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model, optimizer, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_from_restored_state(name):
    model = make(0)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3, seed=1)
    weights = {key: value.clone() for key, value in trained_weights(model).items()}
    tensors, numbers = optimizer_state(optimizer)
    tensors = {key: value.clone() for key, value in tensors.items()}
    other = make(9)
    other_optimizer = OPTIMIZERS[name](other.parameters())
    restore_weights(other, weights)
    restore_optimizer(other_optimizer, tensors, numbers)
    train(model, optimizer, 3, seed=2)
    train(other, other_optimizer, 3, seed=2)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_frozen_weights_are_left_out_and_tied_ones_stand_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert list(trained_weights(model)) == ["0.weight"]
