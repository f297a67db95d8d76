"""A tiny model to be measured in this process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brim.config import load_config
from brim.models.folders import locate
from brim.workflows.measure.messages import Request


@pytest.fixture
def asked(tiny_base):
    """Makes a request. settings: brim's configuration. changes: of the request."""

    def make(settings=None, **changes):
        given = {"trainer": {"type": "finetune", "learning_rate": 0.001}, "generation": {"max_new_tokens": 3}}
        request = Request(
            config=load_config({"base_model": str(tiny_base), **given, **(settings or {})}).config,
            folder=locate(str(tiny_base)),
            trainable=True,
            batch_size=2,
            sequence_length=16,
            step_lengths=((16, 16),),
            num_steps=2,
            phases=("train",),
            device="cpu",
        )
        return replace(request, **changes)

    return make
