"""Configurations for the tiny model: one that trains four steps, and one that trains nothing. Never changed."""

import pytest
from tests.gallery import usual

import brim


@pytest.fixture(scope="module")
def config(tiny_base):
    config = usual(tiny_base, trainer={"train_steps": 4, "learning_rate": 0.05, "early_stop": -1})
    del config["trainer"]["epochs"], config["trainer"]["effective_batch_size"]
    return config


@pytest.fixture(scope="module")
def zero_shot(config):
    return {**config, "adapter": None, "trainer": {"type": "none", "batch_size": 4}}


@pytest.fixture(scope="module")
def model(zero_shot):
    """The base model, whose weights the tests of a module load once."""
    return brim.Model(zero_shot)
