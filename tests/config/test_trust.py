"""A run's folder does not decide that code runs here."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.config import load_config, require_trust_said_again
from brim.errors import ConfigError

WHERE = Path("run/config.yaml")
SOURCE = {
    "base_model": "m",
    "input_features": [{"name": "a", "type": "text"}],
    "output_features": [{"name": "b", "type": "text"}],
}


def test_trust_must_be_said_again():
    config = load_config({**SOURCE, "trust_remote_code": True}).config
    with pytest.raises(ConfigError) as caught:
        require_trust_said_again(config, ["trainer.type=none"], WHERE)
    assert str(caught.value) == (
        "run/config.yaml: trust_remote_code is true in the configuration of a run, which does not decide that for this "
        "machine\n  expected: your own word for it\n  fix: if you trust the base model's code, add "
        "trust_remote_code=true to the command; otherwise trust_remote_code=false"
    )
    require_trust_said_again(config, ["trust_remote_code=true"], WHERE)


def test_without_trust_nothing_is_asked():
    require_trust_said_again(load_config(SOURCE).config, [], WHERE)


def test_a_runs_function_must_be_named_again_where_a_run_begins():
    trainer = {"type": "finetune", "effective_batch_size": 8, "batch_increase_function": "evil:grow"}
    config = load_config({**SOURCE, "trainer": trainer}).config
    with pytest.raises(ConfigError) as caught:
        require_trust_said_again(config, [], WHERE, begins=True)
    assert str(caught.value) == (
        "run/config.yaml: trainer.batch_increase_function names code in the configuration of a run, which does not "
        "decide that for this machine\n  expected: your own word for it\n  fix: if you trust evil:grow, add "
        "trainer.batch_increase_function=evil:grow to the command; otherwise trainer.batch_increase_function=null"
    )
    require_trust_said_again(config, ["trainer.batch_increase_function=evil:grow"], WHERE, begins=True)
    require_trust_said_again(config, [], WHERE)  # predicting, and going on, call no function


def test_both_are_told_at_once():
    trainer = {"type": "finetune", "effective_batch_size": 8, "batch_increase_function": "evil:grow"}
    config = load_config({**SOURCE, "trainer": trainer, "trust_remote_code": True}).config
    with pytest.raises(ConfigError) as caught:
        require_trust_said_again(config, [], WHERE, begins=True)
    assert len(caught.value.problems) == 2
