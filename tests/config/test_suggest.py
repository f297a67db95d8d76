"""For an unknown key: the nearest valid one, or where it belongs."""

from __future__ import annotations

import pytest

from brim.config import misspelt


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("", "base-model", "unknown key base-model\n  fix: did you mean base_model?"),
        ("", "Adapter", "unknown key Adapter\n  fix: did you mean adapter?"),
        ("", "epochs", "unknown key epochs\n  fix: write trainer.epochs: 1"),
        ("", "template", "unknown key template\n  fix: template belongs elsewhere: prompt.template or chat.template"),
        ("", "r", "unknown key r\n  fix: write adapter.r: 1"),
        (
            "",
            "max_sequence_length",
            "unknown key max_sequence_length\n  fix: max_sequence_length belongs elsewhere: "
            "input_features.0.preprocessing.max_sequence_length or output_features.0.preprocessing.max_sequence_length",
        ),
        ("trainer", "learning_rat", "unknown key trainer.learning_rat\n  fix: did you mean trainer.learning_rate?"),
        ("", "seed", "unknown key seed\n  fix: write random_seed: 1"),
        ("adapter", "lora_alpha", "unknown key adapter.lora_alpha\n  fix: write adapter.alpha: 1"),
        ("adapter", "epochs", "unknown key adapter.epochs\n  fix: write trainer.epochs: 1"),
        ("trainer", "warmup_fraction", "unknown key trainer.warmup_fraction\n"
         "  fix: write trainer.learning_rate_scheduler.warmup_fraction: 1"),
        ("trainer", "precision", "unknown key trainer.precision\n  fix: precision belongs to the root"),
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


def test_a_misspelt_key_is_named_whole_wherever_it_stands(minimal, problems):
    source = minimal(trainer={"type": "finetune", "optimizer": {"type": "adam", "weigth_decay": 0.1}})
    source["input_features"][0]["nmae"] = "q"
    told = [text.rsplit("\n", 1)[1] for text in problems(source)]
    assert "  fix: did you mean trainer.optimizer.weight_decay?" in told
    assert "  fix: did you mean input_features.0.name?" in told


def test_a_misspelt_keys_value_is_checked_too(minimal, problems):
    assert problems(minimal(random_sed=-1)) == [
        "random_sed: unknown key random_sed\n  fix: did you mean random_seed?",
        "random_sed: random_seed is -1\n  expected: a whole number of at least 0 and below 4294967296",
    ]


@pytest.mark.parametrize(
    "source",
    [
        {"learning_rat": 1},  # a key of another section
        {"trainer": {"type": "finetune", "epoch": [3]}},  # a number's key for a list
        {"trainer": {"type": "finetune", "train_stepz": {}}},
        {"preprocessing": {"sample_rise": "many"}},  # a number's key for a text
        {"memory": {"bud": 3}},
    ],
)
def test_no_guess_is_better_than_a_wrong_one(minimal, problems, source):
    (text,) = problems(minimal(**source))
    assert "did you mean" not in text
    assert "write" not in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("finetun", "finetune"),
        ("Fine-Tune", "fine_tune"),
        ("fientune", "finetune"),
        ("typ", "type"),
        ("tpye", "type"),
        ("xype", None),  # no slip of type: another word, as rat and cat are
        ("finetine", "finetune"),
        ("ty", None),
        ("mian", None),  # as near to min as to main
        ("save_steps", None),
        ("gradient_clippings", "gradient_clipping"),
        ("gradiant_cliping", "gradient_clipping"),
        ("gradiant_clipin", None),
    ],
)
def test_a_slip_of_the_keyboard(name, meant):
    names = ("finetune", "type", "min", "main", "train_steps", "gradient_clipping")
    assert misspelt(name, (*names, "fine_tune") if meant == "fine_tune" else names) == meant
