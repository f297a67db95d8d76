"""What the loop sets before each update."""

import pytest
import torch
from torch import nn

from brim.config import DeviceFacts, load_config, resolve
from brim.train import build_optimizer
from brim.train.optimizer import FixedBetas, MovingBeta2, update_rates


def trainer(**keys):
    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "effective_batch_size": 16, **keys}}
    return resolve(load_config(source).config, DeviceFacts(kind="cpu", bf16=False)).config.trainer


def optimizer_of(settings):
    return build_optimizer(settings.optimizer, [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, FixedBetas),
        ({"batch_lr_scaling": "sqrt"}, MovingBeta2),  # auto
        ({"batch_lr_scaling": "sqrt", "optimizer": "adamw_8bit"}, MovingBeta2),
        ({"batch_lr_scaling": "sqrt", "optimizer": "lion"}, FixedBetas),
        ({"batch_lr_scaling": "sqrt", "batch_beta2_scaling": False}, FixedBetas),
        ({"batch_beta2_scaling": True}, MovingBeta2),
    ],
)
def test_beta2_moves_where_the_resolved_configuration_says_so(keys, expected):
    settings = trainer(batch_rampup="64sp", **keys)
    assert type(update_rates(settings, optimizer_of(settings), final_size=16)) is expected


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
