"""Values that are fine alone and contradict each other."""

from __future__ import annotations

import pytest

from brim.config import load_config

SCHEDULE = "trainer.learning_rate_scheduler"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompt": {"template": "{question} {answer}"}},
            "prompt.template: prompt.template names the output column answer: the prompt would give the answer away\n"
            "  fix: take {answer} out of the template",
        ),
        (
            {"prompt": {"template": "{x.y}"}},
            "prompt.template: prompt.template: {x.y} is not a plain name\n"
            "  expected: a column's name in braces, without dots, brackets or conversions",
        ),
        (
            {"input_features": [{"name": "answer", "type": "text"}]},
            "output_features.0.name: the input and the output feature are both called answer\n  expected: two names",
        ),
        (
            {"input_features": [{"name": "prompt", "type": "text", "column": "answer"}]},
            "output_features.0.name: the input and the output feature both read the column answer\n"
            "  expected: two columns, or a prompt.template that makes the input",
        ),
        (
            {"preprocessing": {"sample_size": 3, "sample_ratio": 0.5}},
            "preprocessing.sample_size: preprocessing.sample_size and sample_ratio are both given\n"
            "  fix: keep one of them",
        ),
        (
            {"preprocessing": {"split": {"type": "random", "probabilities": [0.7, 0.1, 0.1]}}},
            "preprocessing.split.probabilities: preprocessing.split.probabilities [0.7, 0.1, 0.1] sum to 0.9\n"
            "  expected: train, validation and test shares that sum to 1, such as [0.7, 0.1, 0.2]",
        ),
        (
            {"generation": {"temperature": 0.0}},
            "generation.temperature: generation.temperature is 0 and do_sample is true\n"
            "  expected: a temperature above 0 for sampling\n"
            "  fix: set generation.do_sample: false, which always takes the likeliest token",
        ),
        (
            {"generation": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "generation.min_new_tokens: generation.min_new_tokens is 9\n"
            "  expected: at most generation.max_new_tokens, 8",
        ),
        (
            {"precision": "bf16-true", "adapter": {"type": "lora", "bias_type": "all"}},
            "precision: adapter.bias_type all trains biases, and precision bf16-true has them in 16 bits, which round "
            "small updates away\n"
            "  fix: set precision: bf16-mixed, or adapter.bias_type: none",
        ),
    ],
)
def test_contradictions(minimal, problems, keys, message):
    assert problems(minimal(**keys)) == [message]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"steps_per_checkpoint": 10, "checkpoints_per_epoch": 2},
            "trainer.steps_per_checkpoint: trainer.steps_per_checkpoint and checkpoints_per_epoch are both given\n"
            "  fix: keep one of them",
        ),
        (
            {"early_stop": 0},
            "trainer.early_stop: trainer.early_stop is 0\n  expected: -1 (off), or a whole number of at least 1",
        ),
        (
            {"early_stop": -2},
            "trainer.early_stop: trainer.early_stop is -2\n  expected: -1 (off), or a whole number of at least 1",
        ),
        (
            {"validation_field": "prompt"},
            "trainer.validation_field: trainer.validation_field is 'prompt'\n"
            "  expected: the output feature answer, or combined",
        ),
        (
            {"learning_rate_scheduler": {"decay": "wsd", "warmup_fraction": 0.6, "decay_fraction": 0.5}},
            f"{SCHEDULE}.warmup_fraction: warmup_fraction 0.6 and decay_fraction 0.5 overlap\n"
            "  expected: a sum of at most 1",
        ),
        (
            {"learning_rate_scheduler": {"decay": "cosine", "eta_min": 0.01}},
            f"{SCHEDULE}.eta_min: learning_rate_scheduler.eta_min 0.01 is above trainer.learning_rate 0.001\n"
            "  expected: a lower end for the decay than its start",
        ),
        (
            {"optimizer": {"type": "sgd", "nesterov": True}},
            "trainer.optimizer.nesterov: trainer.optimizer.nesterov needs momentum above 0 and dampening 0\n"
            "  fix: set trainer.optimizer.momentum: 0.9",
        ),
        (
            {"batch_size": 3, "effective_batch_size": 32},
            "trainer.effective_batch_size: trainer.effective_batch_size 32 is no multiple of batch_size 3\n"
            "  expected: effective_batch_size = batch_size × gradient_accumulation_steps × processes\n"
            "  fix: set trainer.effective_batch_size: 30 or 33",
        ),
        (
            {"effective_batch_size": 64, "max_batch_size": 32},
            "trainer.max_batch_size: the effective batch of 64 rows is above trainer.max_batch_size 32\n"
            "  fix: set trainer.max_batch_size: 64, or a smaller effective batch",
        ),
    ],
)
def test_contradictions_in_the_trainer(finetune, problems, keys, message):
    assert problems(finetune(**keys)) == [message]


def test_no_row_to_train_on(minimal, problems):
    split = {"split": {"type": "random", "probabilities": [0.0, 0.5, 0.5]}}
    load_config(minimal(preprocessing=split))  # without training, that is fine
    assert problems(minimal(preprocessing=split, trainer={"type": "finetune"})) == [
        "preprocessing.split.probabilities: preprocessing.split.probabilities leave no row to train on\n"
        "  expected: a first share above 0"
    ]


_NO_BATCH = (
    "trainer.batch_size: trainer.batch_size: auto cuts an effective batch, and trainer.effective_batch_size is not "
    "set: the memory of the device would decide what is learned\n"
    "  expected: trainer.effective_batch_size as a number: the rows of one update\n"
    "  fix: add trainer.effective_batch_size: 32, or as many rows as an update shall see"
)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size": "auto", "gradient_accumulation_steps": 4}, _NO_BATCH),
        (
            {"batch_size": 2, "use_maximum_batch_size": True},
            "trainer.use_maximum_batch_size: trainer.use_maximum_batch_size asks for the largest micro-batch that "
            "fits, and trainer.batch_size 2 fixes it\n"
            "  fix: remove trainer.batch_size (with trainer.effective_batch_size as it shall be), or "
            "use_maximum_batch_size",
        ),
        (
            {"gradient_accumulation_steps": 2, "effective_batch_size": 8, "use_maximum_batch_size": True},
            "trainer.use_maximum_batch_size: trainer.use_maximum_batch_size asks for the largest micro-batch that "
            "fits, and trainer.gradient_accumulation_steps 2 fixes it\n"
            "  fix: remove trainer.gradient_accumulation_steps (with trainer.effective_batch_size as it shall be), or "
            "use_maximum_batch_size",
        ),
    ],
)
def test_a_cut_is_of_a_batch_and_chosen_once(finetune, problems, keys, message):
    assert problems(finetune(**keys)) == [message]


def test_a_cut_by_length_may_be_spelled_out(finetune):
    keys = {"batch_size": "auto", "gradient_accumulation_steps": "auto", "use_maximum_batch_size": True, "epochs": 1}
    assert load_config(finetune(effective_batch_size=32, **keys)).notes == ()
    assert load_config(finetune(**keys)).notes == ()


def test_a_search_without_a_choice_is_told(finetune):
    searched = {"batch_search": "halving", "effective_batch_size": 32, "epochs": 1}
    assert load_config(finetune(**searched)).notes == ()
    assert load_config(finetune(**searched, batch_size=4)).notes == (
        "trainer.batch_search: trainer.batch_search has no effect, trainer.batch_size decides",
    )


def test_a_faulty_value_is_not_reported_twice(finetune, problems):
    assert problems(finetune(batch_size=0, effective_batch_size=32, validation_field="x", validation_metric="y")) == [
        "trainer.batch_size: trainer.batch_size is 0\n  expected: a whole number of at least 1, or auto",
        "trainer.validation_field: trainer.validation_field is 'x'\n  expected: the output feature answer, or combined",
        "trainer.validation_metric: trainer.validation_metric is 'y'\n"
        "  expected: loss, perplexity, token_accuracy, sequence_accuracy or null",
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt": {"template": "{question}"}, "input_features": [{"name": "p", "type": "text", "column": "answer"}]},
        {"preprocessing": {"sample_size": 3, "sample_ratio": 1.0}},
        {"preprocessing": {"split": {"type": "random", "probabilities": [1.0, 0, 0]}}},
        {"generation": {"temperature": 0.0, "do_sample": False}},
        {"trainer": {"type": "finetune", "validation_field": "combined", "early_stop": -1}},
        {"trainer": {"type": "finetune", "validation_field": "answer", "validation_metric": "token_accuracy"}},
        {"trainer": {"type": "finetune", "optimizer": {"type": "sgd", "nesterov": True, "momentum": 0.9}}},
    ],
)
def test_what_looks_like_a_contradiction_and_is_none(minimal, keys):
    load_config(minimal(**keys))


def test_an_adapter_needs_a_base_that_can_be_had_again(minimal, problems):
    (message,) = problems(minimal(adapter="lora", initialize="random"))
    assert "an adapter on random weights (initialize: random) would be saved without those weights" in message
