"""What the loop sets before each update."""

import pytest
import torch
from torch import nn

from brim.config import load_config
from brim.train.moving_beta2 import MovingBeta2
from brim.train.optimizer import build_optimizer
from brim.train.update_rates import FixedBetas, moves_beta2, update_rates


def trainer(**keys):
    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "effective_batch_size": 16, **keys}}
    return load_config(source).config.trainer


def optimizer_of(settings):
    return build_optimizer(settings.optimizer, [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("keys", "moves"),
    [
        ({}, False),
        ({"batch_lr_scaling": "linear"}, False),
        ({"batch_lr_scaling": "sqrt"}, True),
        ({"batch_lr_scaling": "sqrt", "optimizer": "paged_adamw_8bit"}, True),
        ({"batch_lr_scaling": "sqrt", "optimizer": "lion"}, False),
        ({"batch_lr_scaling": "sqrt", "optimizer": "sgd"}, False),
        ({"batch_lr_scaling": "sqrt", "batch_beta2_scaling": False}, False),
        ({"batch_beta2_scaling": True}, True),
    ],
)
def test_beta2_moves_as_asked_and_by_itself_with_the_square_root_in_an_adam(keys, moves):
    settings = trainer(batch_rampup="64sp", **keys)
    assert moves_beta2(settings) == moves
    rates = update_rates(settings, optimizer_of(settings), final_size=16)
    assert isinstance(rates, MovingBeta2 if moves else FixedBetas)


def test_fixed_betas_set_the_learning_rate_alone_and_keep_nothing():
    settings = trainer()
    optimizer = optimizer_of(settings)
    before = dict(optimizer.param_groups[0])
    rates = update_rates(settings, optimizer, final_size=16)
    rates.set(size=4, learning_rate=0.25)
    rates.stepped()
    assert optimizer.param_groups[0] == {**before, "lr": 0.25}
    assert rates.state() == {}
    rates.restore({})
