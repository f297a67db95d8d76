"""Ludwig's keys and values that are not supported yet are named; those that mean "off" are accepted."""

from __future__ import annotations

import pytest

from brim.config import KEYS, VALUES, all_keys, load_config
from brim.config.yaml import contains

SECTIONS = {
    "trainer": {"type": "finetune"},
    "adapter": {"type": "lora"},
    "backend": {"type": "local"},
    "quantization": {"bits": 8},
}


def _with(minimal, key, value):
    """The least configuration with a dotted key set, `*` being the first entry of a list, or a label."""
    source = minimal(**{name: dict(section) for name, section in SECTIONS.items()})
    at = source
    *parents, last = key.split(".")
    for part in parents:
        if part == "*":
            at = at[0] if isinstance(at, list) else at.setdefault("0", {"value": "text"})
        else:
            at = at.setdefault(part, {})
    at[last] = value
    return source


@pytest.mark.parametrize("entry", KEYS, ids=lambda entry: entry.key)
def test_every_unsupported_key_is_named_and_off_is_accepted(minimal, problems, entry):
    dotted = entry.key.replace("*", "0")
    fix = f"\n  fix: {entry.instead or 'remove it'}"
    assert problems(_with(minimal, entry.key, "something")) == [
        f"{dotted}: {dotted} is not supported yet ({entry.about}){fix}"
    ]
    plain = load_config(_with(minimal, "random_seed", 42)).config
    for off in (None, *entry.off, *(({"type": None, "k": 0}, {}) if entry.off_when_empty else ())):
        if not contains(SECTIONS, tuple(entry.key.split("."))):
            assert load_config(_with(minimal, entry.key, off)).config.model_dump() == plain.model_dump()


@pytest.mark.parametrize("entry", VALUES, ids=lambda entry: entry.key)
def test_every_unsupported_value_is_named(minimal, problems, entry):
    for value in entry.values:
        shown = {True: "true", False: "false", None: "null"}.get(value, value)
        dotted = entry.key.replace("*", "0") + (".type" if entry.is_type else "")
        fix = f"\n  fix: {entry.instead}" if entry.instead else ""
        message = f"{dotted} is not supported yet".replace(dotted, f"{dotted}: {dotted}: {shown}", 1)
        expected = f"{message}\n  expected: {entry.expected}{fix}"
        assert problems(_with(minimal, entry.key, value)) == [expected]
        if entry.is_type:
            assert problems(_with(minimal, entry.key, {"type": value})) == [expected]


def test_no_supported_key_is_in_the_table():
    supported = {".".join(key.path) for key in all_keys()}
    assert supported & {entry.key for entry in KEYS} == set()
    assert {entry.key for entry in VALUES} <= supported


def test_the_messages_read_well(file, problems):
    text = """\
base_model: m
input_features: [{name: a, type: text}]
output_features: [{name: b, type: number}]
quantization: {backend: torchao}
trainer:
  type: finetune
  compile: true
  use_mixed_precision: true
"""
    assert problems(file(text)) == [
        "config.yaml:3: output_features.0.type: number is not supported yet\n  expected: text or category",
        "config.yaml:4: quantization.backend: torchao is not supported yet\n  expected: bitsandbytes",
        "config.yaml:7: trainer.compile is not supported yet (torch.compile)\n  fix: remove it",
        "config.yaml:8: trainer.use_mixed_precision is not supported yet (mixed precision by this key)\n"
        "  fix: use the root's precision",
    ]


def test_an_encoder_and_a_search_are_no_unknown_keys_to_remove(minimal, problems):
    encoder = {"type": "bert", "trainable": True, "pretrained_model_name_or_path": "m", "adapter": "lora"}
    source = minimal(hyperopt={"parameters": {"trainer.epochs": [1, 2]}})
    source["input_features"][0]["encoder"] = encoder
    texts = problems(source)
    assert len(texts) == 5
    assert all(" is not supported yet" in text and "unknown" not in text for text in texts)
    assert "\n  fix: compare written configurations with `brim compare`" in texts[-1]
    assert not any("remove it" in text for text in texts)
