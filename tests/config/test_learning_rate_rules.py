"""Warm-up and decay that do not fit into the run, or contradict each other."""

from __future__ import annotations

import pytest

from brim.config import load_config

SCHEDULE = "trainer.learning_rate_scheduler"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"warmup_length": "5ba", "warmup_fraction": 0.1},
            f"{SCHEDULE}.warmup_length: learning_rate_scheduler.warmup_length and warmup_fraction are both given\n"
            "  fix: keep one of them",
        ),
        (
            {"decay": "wsd", "decay_length": "5ba", "decay_fraction": 0.2},
            f"{SCHEDULE}.decay_length: learning_rate_scheduler.decay_length and decay_fraction are both given\n"
            "  fix: keep one of them",
        ),
        (
            {"decay": "cosine", "decay_length": "5ba"},
            f"{SCHEDULE}.decay_length: learning_rate_scheduler.decay_length is how long wsd falls, and decay is cosine\n"
            f"  fix: set {SCHEDULE}.decay: wsd, or remove decay_length",
        ),
        (
            {"warmup_length": "5"},
            f"{SCHEDULE}.warmup_length: {SCHEDULE}.warmup_length: '5' is no duration: a number and a unit, ba "
            "(batches), ep (epochs), sp (samples), tok (tokens) or dur (share of the run), such as 500ba, 2ep, 5000sp, "
            "1e6tok or 0.1dur",
        ),
        (
            {"decay": "wsd", "warmup_length": "0.6dur", "decay_length": "0.5dur"},
            f"{SCHEDULE}.warmup_length: warmup_length 0.6dur and decay_length 0.5dur overlap\n"
            "  expected: a sum of at most 1",
        ),
        (
            {"decay": "wsd", "warmup_fraction": 0.6, "decay_length": "0.5dur"},
            f"{SCHEDULE}.warmup_fraction: warmup_fraction 0.6 and decay_length 0.5dur overlap\n"
            "  expected: a sum of at most 1",
        ),
    ],
)
def test_contradictions(finetune, problems, keys, message):
    assert problems(finetune(learning_rate_scheduler=keys)) == [message]


@pytest.mark.parametrize(
    "keys",
    [
        {"warmup_length": "5ba"},
        {"warmup_length": "1ep", "warmup_fraction": 0.0},
        {"decay": "wsd", "warmup_length": "0.6dur", "decay_length": "0.4dur"},
        {"decay": "wsd", "warmup_fraction": 0.7, "decay_fraction": 0.3},  # 0.7 + 0.3 in binary is 1
        {"decay": "wsd", "warmup_fraction": 0.9, "decay_fraction": 0.1},
        {"decay": "wsd", "warmup_length": "1ep", "decay_length": "100sp"},  # compared once the run's length is known
        {"decay": "wsd", "decay_length": "100tok"},
    ],
)
def test_what_is_allowed(finetune, keys):
    config = load_config(finetune(learning_rate_scheduler=keys)).config
    assert load_config(config.model_dump(mode="json", exclude={"trainer": {"batch_size"}})).config == config
