"""What loading accepts, and the words with which it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from brim.config import load_config
from brim.config.schema import FinetuneTrainer, LoraConfig, NoTrainer, RandomSplit

MINIMAL = """\
base_model: model
input_features:
  - name: prompt
    type: text
output_features:
  - name: answer
    type: text
"""

WORKSHOP = """\
model_type: llm
base_model: ./model

input_features:
  - name: prompt
    type: text
output_features:
  - name: output
    type: text

prompt:
  template: |
    Below is an instruction that describes a task, paired with an input that may provide further context.
    Write a response that appropriately completes the request.

    ### Instruction: {instruction}

    ### Input: {input}

    ### Response:

generation:
  temperature: 0.1
  max_new_tokens: 512

adapter:
  type: lora

preprocessing:
  split:
    type: random
    probabilities:
    - 1.0
    - 0
    - 0

trainer:
  type: finetune
  learning_rate: 0.0001
  epochs: 3
  batch_size: 1
  gradient_accumulation_steps: auto
  effective_batch_size: 32
  optimizer: {type: adam}
  learning_rate_scheduler:
    decay: cosine
    warmup_fraction: 0.03

backend:
  type: local
"""


def test_the_workshops_configuration_loads_as_it_stands(file):
    loaded = load_config(file(WORKSHOP))
    assert loaded.name == "config.yaml"
    assert loaded.notes == ()
    assert loaded.config.adapter == LoraConfig(type="lora")
    trainer = loaded.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    assert (trainer.learning_rate, trainer.epochs, trainer.effective_batch_size) == (0.0001, 3, 32)
    assert (trainer.learning_rate_scheduler.decay, trainer.learning_rate_scheduler.warmup_fraction) == ("cosine", 0.03)
    assert loaded.config.preprocessing.split == RandomSplit(probabilities=(1.0, 0.0, 0.0))


def test_so_does_the_shape_with_accumulation_and_no_effective_batch(file):
    text = WORKSHOP.replace("gradient_accumulation_steps: auto", "gradient_accumulation_steps: 16")
    loaded = load_config(file(text.replace("  effective_batch_size: 32\n", "")))
    assert isinstance(loaded.config.trainer, FinetuneTrainer)
    assert loaded.config.trainer.gradient_accumulation_steps == 16
    assert loaded.config.trainer.effective_batch_size == "auto"


def test_ludwigs_defaults_hold_where_nothing_is_said(minimal):
    config = load_config(minimal()).config
    assert isinstance(config.trainer, NoTrainer)
    assert (config.model_type, config.adapter, config.random_seed, config.trust_remote_code) == ("llm", None, 42, False)
    generation = config.generation
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (True, 0.1, 50, 1.0)
    config = load_config(minimal(trainer={"type": "finetune"}, adapter="lora")).config
    assert isinstance(config.trainer, FinetuneTrainer)
    assert (config.trainer.learning_rate, config.trainer.early_stop) == (0.001, 5)
    assert config.trainer.gradient_clipping is not None
    assert config.trainer.gradient_clipping.clipglobalnorm == 0.5
    assert config.trainer.optimizer.type == "adam"
    assert config.adapter is not None
    assert (config.adapter.r, config.adapter.alpha, config.adapter.dropout) == (8, None, 0.05)


def test_bare_types_and_explicit_nulls(minimal):
    config = load_config(
        minimal(
            adapter=None,
            backend="local",
            preprocessing={"split": "random"},
            trainer={"type": "finetune", "optimizer": "sgd", "gradient_clipping": None},
        )
    ).config
    assert isinstance(config.trainer, FinetuneTrainer)
    assert (config.backend.type, config.trainer.optimizer.type, config.trainer.gradient_clipping) == (
        "local",
        "sgd",
        None,
    )


def test_a_mapping_may_hold_pythons_own_values(minimal):
    source = minimal(
        dataset=Path("data.jsonl"), random_seed=np.int64(7), adapter={"type": "lora", "target_modules": ("q", "v")}
    )
    source["preprocessing"] = {"sample_ratio": np.float32(0.5)}
    config = load_config(source).config
    assert (config.dataset, config.random_seed, config.preprocessing.sample_ratio) == ("data.jsonl", 7, 0.5)
    assert config.adapter is not None
    assert config.adapter.target_modules == ("q", "v")


def test_all_problems_come_at_once_in_the_order_of_the_file(file, problems):
    text = """\
base_modl: model
learning_rate: 0.1
input_features:
  - name: prompt
    typ: text
output_features:
  - name: answer
    type: text
    preprocessing: {max_sequence_length: "12"}
quantization:
  bits: 5
trainer:
  type: finetun
  epoch: 3
  optimizer: {type: adam, momentum: 0.9}
  gradient_accumulation_steps: 0
  enable_gradient_checkpointing: yes
preprocessing:
  sample_size: 10
  sample_ratio: 0.5
"""
    assert problems(file(text)) == [
        "config.yaml:1: unknown key base_modl\n  fix: did you mean base_model?",
        "config.yaml:2: unknown key learning_rate\n  fix: write trainer.learning_rate: 0.1",
        "config.yaml:5: unknown key input_features.0.typ\n  fix: did you mean input_features.0.type?",
        "config.yaml:9: output_features.0.preprocessing.max_sequence_length is '12'\n"
        "  expected: a whole number of at least 1, or null\n"
        "  fix: write 12 without quotes",
        "config.yaml:11: quantization.bits is 5\n  expected: 4 or 8",
        "config.yaml:13: trainer.type is 'finetun'\n  expected: none or finetune\n  fix: did you mean finetune?",
        "config.yaml:14: unknown key trainer.epoch\n  fix: did you mean trainer.epochs?",
        "config.yaml:15: trainer.optimizer.momentum has no place with trainer.optimizer.type: adam\n"
        "  fix: remove it, or set trainer.optimizer.type: sgd",
        "config.yaml:16: trainer.gradient_accumulation_steps is 0\n  expected: a whole number of at least 1, or auto",
        "config.yaml:17: trainer.enable_gradient_checkpointing is 'yes'\n  expected: true or false, or auto\n"
        "  fix: write true",
        "config.yaml:19: preprocessing.sample_size and sample_ratio are both given\n  fix: keep one of them",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("random_seed: -1", "config.yaml:8: random_seed is -1\n  expected: a whole number of at least 0 and below 4294967296"),
        ("random_seed: true", "config.yaml:8: random_seed is true\n  expected: a whole number of at least 0 and below 4294967296"),
        ("random_seed: 1.0", "config.yaml:8: random_seed is 1.0\n  expected: a whole number of at least 0 and below 4294967296"),
        ("dataset: 3", "config.yaml:8: dataset is 3\n  expected: text, a list of texts, or null\n  fix: put it in quotes"),
        ("dataset: ''", "config.yaml:8: dataset is empty\n  expected: text, a list of texts, or null"),
        (
            "dataset: 2001-01-01",
            "config.yaml:8: dataset is the date 2001-01-01\n  expected: text, a list of texts, or null\n  fix: put it in quotes",
        ),
        ("generation: 3", "config.yaml:8: generation is 3\n  expected: a mapping"),
        ("trainer: 3", "config.yaml:8: trainer is 3\n  expected: none, finetune, or a mapping with type"),
        ("trainer: finetuned", "config.yaml:8: trainer.type is 'finetuned'\n  expected: none or finetune\n"
         "  fix: did you mean finetune?"),
        ("adapter: lora2", "config.yaml:8: adapter.type is 'lora2'\n  expected: lora\n  fix: did you mean lora?"),
        ("adapter: {r: 4}", "config.yaml:8: adapter.type is missing\n  expected: lora\n"
         "  fix: add it. The kind of adapter. `adapter: lora` is short for `{type: lora}`."),
        ("adapter:\n  type: lora\n  target_modules: [1]", "config.yaml:10: adapter.target_modules is [1]\n"
         "  expected: a list of layer names, a regular expression, all-linear, or null"),
        ("precision: bf16", "config.yaml:8: precision is 'bf16'\n"
         "  expected: auto, fp32, bf16-true, bf16-mixed or fp16-mixed\n  fix: write precision: bf16-mixed"),
        ("generation:\n  top_p: .nan", "config.yaml:9: generation.top_p is nan\n  expected: a number from 0 to 1"),
        ("generation:\n  temperature: '1e-1'", "config.yaml:9: generation.temperature is '1e-1'\n"
         "  expected: a number of at least 0\n  fix: write 0.1"),
        ("preprocessing:\n  split: {type: hash}", "config.yaml:9: preprocessing.split.column is missing\n"
         "  expected: text\n  fix: add it. The column that is hashed."),
        ("backend: {workers: 2}", "config.yaml:8: unknown key backend.workers\n"
         "  expected: one of type\n  fix: remove it"),
        ("lr: 3", "config.yaml:8: unknown key lr\n  fix: the key is trainer.learning_rate: a number from 0 to 1, or auto"),
        ("5: 3", "config.yaml:8: unknown key 5\n  expected: one of model_type, base_model, initialize, precision, "
         "model_parameters, input_features, output_features, prompt, chat, adapter, quantization, trainer, preprocessing, generation, "
         "memory, backend, dataset, random_seed, trust_remote_code\n  fix: remove it"),
    ],
)  # fmt: skip
def test_one_wrong_value_gives_one_message(file, problems, lines, message):
    assert problems(file(MINIMAL + lines + "\n")) == [message]


@pytest.mark.parametrize(
    ("features", "messages"),
    [
        ("[]", ["config.yaml:2: input_features is an empty list\n  expected: a list with at least one feature"]),
        ("3", ["config.yaml:2: input_features is 3\n  expected: a list with at least one feature"]),
        ("[3]", ["config.yaml:2: input_features.0 is 3\n  expected: a mapping"]),
        ("[{type: text}]", ["config.yaml:2: input_features.0.name is missing\n  expected: text\n"
         "  fix: add it. The feature's name; also its column, unless `column` says otherwise."]),
        ("[{name: a, type: texts}]", ["config.yaml:2: input_features.0.type is 'texts'\n"
         "  expected: text, category, number or binary\n"
         "  fix: did you mean text?"]),
    ],
)  # fmt: skip
def test_input_features_that_are_none(file, problems, features, messages):
    text = f"base_model: m\ninput_features: {features}\noutput_features: [{{name: answer, type: text}}]\n"
    assert problems(file(text)) == messages


def test_what_is_missing_is_told_with_its_meaning(file, problems):
    assert problems(file("random_seed: 1\n")) == [
        "config.yaml: base_model is missing\n  expected: text\n"
        "  fix: add it. A folder with a transformers causal language model, or its Hub id.",
    ]


def test_without_features_the_columns_are_prompt_and_completion():
    config = load_config({"base_model": "m"}).config
    assert [feature.column_name for feature in config.input_features] == ["prompt"]
    assert [feature.column_name for feature in config.output_features] == ["completion"]


def test_a_mapping_names_its_keys_as_places(minimal, problems):
    source = minimal(trainer={"type": "finetune", "epochs": 0})
    del source["base_model"]
    assert problems(source) == [
        "base_model: base_model is missing\n  expected: text\n"
        "  fix: add it. A folder with a transformers causal language model, or its Hub id.",
        "trainer.epochs: trainer.epochs is 0\n  expected: a whole number of at least 1",
    ]


def test_keys_without_effect_are_noted(minimal, file):
    loaded = load_config(file(MINIMAL + "trainer:\n  epochs: 5\n  learning_rate: 0.1\nprompt: {template: Hello}\n"))
    assert loaded.notes == (
        "config.yaml:10: learning_rate, epochs have no effect with trainer.type: none; "
        "set trainer.type: finetune to train",
        "config.yaml:11: prompt.template names no column, so every row gets the same prompt",
    )
    loaded = load_config(minimal(trainer={"type": "finetune", "epochs": 5, "train_steps": 10}))
    assert loaded.notes == ("trainer.epochs: trainer.epochs has no effect, trainer.train_steps decides",)


def test_ludwigs_spellings_are_noted(file):
    text = (
        MINIMAL
        + "ludwig_version: 0.10\ntrainer:\n  type: finetune\n  learning_rate_scheduler: {wsd_decay_fraction: 0.2}\n"
    )
    loaded = load_config(file(text))
    assert isinstance(loaded.config.trainer, FinetuneTrainer)
    assert loaded.config.trainer.learning_rate_scheduler.decay_fraction == 0.2
    assert loaded.notes == (
        "config.yaml:11: trainer.learning_rate_scheduler.wsd_decay_fraction is read as "
        "trainer.learning_rate_scheduler.decay_fraction",
        "config.yaml:8: ludwig_version has no effect",
    )


def test_a_secret_in_a_wrong_place_is_not_repeated(minimal, problems):
    token = "hf_" + "a1B2" * 8 + "c3"
    assert problems(minimal(precision=token)) == [
        "precision: precision is '***'\n  expected: auto, fp32, bf16-true, bf16-mixed or fp16-mixed"
    ]


def test_loading_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from brim.config import load_config\n"
        "feature = lambda name: [{'name': name, 'type': 'text'}]\n"
        "load_config({'base_model': 'm', 'input_features': feature('a'), 'output_features': feature('b')})\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["none", "finetune"])
@pytest.mark.parametrize("given", ["auto", None, 3])
def test_rows_that_are_evaluated_at_once_may_be_left_open(file, kind, given):
    text = MINIMAL + f"trainer: {{type: {kind}, eval_batch_size: {'null' if given is None else given}}}\n"
    assert load_config(file(text)).config.trainer.eval_batch_size == given
