"""For an unknown key: the nearest valid one, or where it belongs."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("", "base-model", "unknown key base-model\n  fix: did you mean base_model?"),
        ("", "Adapter", "unknown key Adapter\n  fix: did you mean adapter?"),
        ("", "epochs", "unknown key epochs\n  fix: epochs belongs elsewhere: trainer.epochs"),
        ("", "template", "unknown key template\n  fix: template belongs elsewhere: prompt.template or chat.template"),
        ("", "r", "unknown key r\n  fix: r belongs elsewhere: adapter.r"),
        (
            "",
            "max_sequence_length",
            "unknown key max_sequence_length\n  fix: max_sequence_length belongs elsewhere: "
            "input_features.0.preprocessing.max_sequence_length or output_features.0.preprocessing.max_sequence_length",
        ),
        ("", "learning_rat", "unknown key learning_rat\n  fix: did you mean trainer.learning_rate?"),
        ("", "seed", "unknown key seed\n  fix: did you mean random_seed?"),
        ("adapter", "lora_alpha", "unknown key adapter.lora_alpha\n  fix: did you mean adapter.alpha?"),
        ("adapter", "epochs", "unknown key adapter.epochs\n  fix: epochs belongs elsewhere: trainer.epochs"),
        ("trainer", "warmup_fraction", "unknown key trainer.warmup_fraction\n"
         "  fix: warmup_fraction belongs elsewhere: trainer.learning_rate_scheduler.warmup_fraction"),
        ("trainer", "precision", "unknown key trainer.precision\n  fix: precision belongs elsewhere: precision"),
        ("prompt", "xyz", "unknown key prompt.xyz\n  expected: one of template, task, retrieval\n  fix: remove it"),
    ],
)  # fmt: skip
def test_unknown_keys(minimal, problems, section, key, message):
    source = minimal(adapter={"type": "lora"}, trainer={"type": "finetune"}, prompt={})
    (source[section] if section else source)[key] = 1
    dotted = f"{section}.{key}" if section else key
    assert problems(source) == [f"{dotted}: {message}"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"trainer": {"optimizer": {"type": "adam"}}},
            "trainer.optimizer has no place with trainer.type: none\n  fix: remove it, or set trainer.type: finetune",
        ),
        (
            {"preprocessing": {"split": {"type": "random", "column": "id"}}},
            "preprocessing.split.column has no place with preprocessing.split.type: random\n"
            "  fix: remove it, or set preprocessing.split.type: fixed",
        ),
    ],
)
def test_keys_of_another_type_of_the_section(minimal, problems, keys, message):
    assert [text.split(": ", 1)[1] for text in problems(minimal(**keys))] == [message]


def test_a_misspelt_keys_value_is_checked_too(minimal, problems):
    assert problems(minimal(random_sed=-1)) == [
        "random_sed: unknown key random_sed\n  fix: did you mean random_seed?",
        "random_sed: random_seed is -1\n  expected: a whole number of at least 0 and below 4294967296",
    ]
