"""A configuration for the tiny model, and its parts."""

import pytest


@pytest.fixture
def config(tiny_base):
    return {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": "fixed"},
        "generation": {"max_new_tokens": 6, "do_sample": False},
        "trainer": {"type": "finetune", "train_steps": 4, "batch_size": 4, "learning_rate": 0.05, "early_stop": -1},
    }


@pytest.fixture
def zero_shot(config):
    return {**config, "adapter": None, "trainer": {"type": "none", "batch_size": 4}}
