"""Dotted overrides: `trainer.epochs=1`."""

from __future__ import annotations

import pytest

from brim.config import load_config
from brim.config.schema import FinetuneTrainer


def test_overrides_set_values_and_make_sections(minimal):
    loaded = load_config(
        minimal(adapter="lora"),
        [
            "trainer.type=finetune",
            "trainer.epochs=2",
            "trainer.epochs=3",
            "adapter.r=16",
            "adapter.target_modules=[q_proj, v_proj]",
            "input_features.0.name=question",
            "input_features.0.preprocessing.max_sequence_length=128",
            "trainer.gradient_clipping=null",
            "trainer.learning_rate=1e-4",
            "prompt.template='{a}: {b}'",
            "dataset=a=b.csv",
        ],
    )
    config = loaded.config
    assert isinstance(config.trainer, FinetuneTrainer)
    assert (config.trainer.epochs, config.trainer.gradient_clipping, config.trainer.learning_rate) == (3, None, 0.0001)
    assert config.adapter is not None
    assert (config.adapter.type, config.adapter.r, config.adapter.target_modules) == ("lora", 16, ("q_proj", "v_proj"))
    assert config.input_features[0].name == "question"
    assert config.input_features[0].type == "text"
    assert config.input_features[0].preprocessing.max_sequence_length == 128
    assert (config.prompt.template, config.dataset) == ("{a}: {b}", "a=b.csv")


def test_a_list_can_be_begun():
    feature = {"name": "answer", "type": "text"}
    loaded = load_config(
        {"base_model": "m", "output_features": [feature]}, ["input_features.0.name=q", "input_features.0.type=text"]
    )
    assert loaded.config.input_features[0].name == "q"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.epochs", "override trainer.epochs: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1"),
        (
            "parts/two.jsonl",  # what a shell makes of --dataset parts/*.jsonl
            "override parts/two.jsonl: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1\n"
            "  fix: write --dataset before each file; or put a pattern in quotes, so that the shell hands it on as it is",
        ),
        ("=1", "override =1: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1"),
        ("a..b=1", "override a..b=1: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1"),
        ("trainer.epoch=1", "override trainer.epoch=1: unknown key trainer.epoch\n  fix: did you mean trainer.epochs?"),
        (
            "random_seed=x",
            "override random_seed=x: random_seed is 'x'\n  expected: a whole number of at least 0 and below 4294967296",
        ),
        (
            "base_model.x=1",
            "override base_model.x=1: base_model holds a single value and no keys\n  expected: base_model=VALUE",
        ),
        (
            "input_features.2.name=x",
            "override input_features.2.name=x: input_features is a list and has no entry 2\n"
            "  expected: a number from 0 to 1, such as input_features.0",
        ),
        (
            "input_features.name=x",
            "override input_features.name=x: input_features is a list and has no entry name\n"
            "  expected: a number from 0 to 1, such as input_features.0",
        ),
        (
            "prompt.template={a} b: {c}",
            "override prompt.template={a} b: {c}: the value cannot be read as YAML\n  fix: put it in quotes",
        ),
    ],
)
def test_a_wrong_override_is_named_as_the_place(minimal, problems, override, message):
    assert problems(minimal(), (override,)) == [message]


def test_overrides_come_after_the_file_and_all_at_once(file, problems):
    text = "base_model: 3\ninput_features: [{name: a, type: text}]\noutput_features: [{name: b, type: text}]\n"
    assert problems(file(text), ("random_seed=x", "precision=y")) == [
        "config.yaml:1: base_model is 3\n  expected: text\n  fix: put it in quotes",
        "override random_seed=x: random_seed is 'x'\n  expected: a whole number of at least 0 and below 4294967296",
        "override precision=y: precision is 'y'\n  expected: auto, fp32, bf16-true, bf16-mixed or fp16-mixed",
    ]


def test_the_document_given_is_not_changed(minimal):
    source = minimal(adapter={"type": "lora", "r": 4})
    load_config(source, ["adapter.r=8", "input_features.0.name=x"])
    assert source == minimal(adapter={"type": "lora", "r": 4})


def test_secrets_in_overrides_are_masked(minimal, problems):
    token = "hf_" + "a1B2" * 8 + "c3"
    assert problems(minimal(), (f"acces={token}",)) == [
        "override acces=***: unknown key acces\n  expected: one of model_type, base_model, initialize, precision, "
        "model_parameters, input_features, output_features, prompt, chat, adapter, quantization, trainer, preprocessing, generation, "
        "memory, backend, dataset, random_seed, trust_remote_code\n  fix: remove it"
    ]


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("trainer.epochs=abc", "trainer.epochs is 'abc'"),
        ("trainr.epochs=3", "unknown key trainr"),  # a section that the file has not
        ("special_tokens.pad_token=x", "unknown key special_tokens"),
        ("quantization.llm_int8_threshold=-1", "quantization.llm_int8_threshold is -1"),
        ("output_features.0.name=prompt", "the input and the output feature are both called prompt"),
        ("input_features.0.name=answer", "the input and the output feature are both called answer"),
        ("trainer.gradient_accumulation_steps=4", "trainer.effective_batch_size 9 is no multiple of"),
        ("trainer.batch_size=4", "trainer.effective_batch_size 9 is no multiple of"),
        ("generation.temperature=0", "generation.temperature is 0 and do_sample is true"),
        ("generation.min_new_tokens=9", "generation.min_new_tokens is 9"),
        ("generation.max_new_tokens=1", "generation.min_new_tokens is 2"),
    ],
)
def test_an_override_that_breaks_the_file_is_the_place(file, problems, override, what):
    text = """\
base_model: m
input_features: [{name: prompt, type: text}]
output_features: [{name: answer, type: text}]
trainer: {type: finetune, effective_batch_size: 9}
generation: {do_sample: true, min_new_tokens: 2, max_new_tokens: 4}
"""
    (message,) = problems(file(text), (override,))
    assert message.startswith(f"override {override}: {what}")


def test_an_override_that_cannot_be_read_hides_nothing(file, problems):
    assert problems(file("base_model: 3\n"), ("random_seed", "precision=y")) == [
        "config.yaml:1: base_model is 3\n  expected: text\n  fix: put it in quotes",
        "override precision=y: precision is 'y'\n  expected: auto, fp32, bf16-true, bf16-mixed or fp16-mixed",
        "override random_seed: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1",
    ]
