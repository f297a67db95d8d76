"""What loading accepts, with what it refuses; overrides; files that are none; whose word counts; and any mutation."""

import copy
import datetime
import itertools
import json
import os
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from docs.generate import EXAMPLE
from hypothesis import given, strategies as st
from tests.messages import refused, says
from tests.properties import examples

from brim.config import load_config, require_trust_said_again
from brim.config.schema import FinetuneTrainer, LoraConfig, RandomSplit
from brim.config.text.reading import MAX_BYTES
from brim.errors import ConfigError

MINIMAL = """\
base_model: model
input_features:
  - name: prompt
    type: text
output_features:
  - name: answer
    type: text
"""
WORKSHOP = f"""\
{EXAMPLE}
model_type: llm
preprocessing: {{split: {{type: random, probabilities: [1.0, 0, 0]}}}}
backend: {{type: local}}
"""


def test_what_the_workshops_configuration_says_loads(file):
    """What the page of all keys begins with, and what Ludwig's users write beside it."""
    loaded = load_config(file(WORKSHOP))
    assert (loaded.name, loaded.notes) == ("config.yaml", ())
    assert loaded.config.adapter == LoraConfig(type="lora")
    trainer = loaded.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    assert (trainer.learning_rate, trainer.epochs, trainer.effective_batch_size) == (0.0001, 3, 32)
    assert (trainer.learning_rate_scheduler.decay, trainer.learning_rate_scheduler.warmup_fraction) == ("cosine", 0.03)
    assert loaded.config.preprocessing.split == RandomSplit(probabilities=(1.0, 0.0, 0.0))
    as_on_windows = b"\xef\xbb\xbf" + WORKSHOP.replace("\n", "\r\n").encode()
    assert load_config(file(as_on_windows)).config == loaded.config


def test_bare_types_explicit_nulls_and_pythons_own_values(minimal):
    trainer = {"type": "finetune", "optimizer": "sgd", "gradient_clipping": None}
    config = load_config(minimal(adapter=None, backend="local", trainer=trainer)).config
    assert (config.backend.type, config.trainer.optimizer.type) == ("local", "sgd")
    assert (config.adapter, config.trainer.gradient_clipping) == (None, None)
    adapter = {"type": "lora", "target_modules": ("q", "v")}
    preprocessing = {"split": "random", "sample_ratio": np.float32(0.5)}
    source = minimal(dataset=Path("data.jsonl"), random_seed=np.int64(7), adapter=adapter, preprocessing=preprocessing)
    config = load_config(source).config
    assert (config.dataset, config.random_seed, config.preprocessing.sample_ratio) == ("data.jsonl", 7, 0.5)
    assert (config.adapter.target_modules, config.preprocessing.split.type) == (("q", "v"), "random")
    for kind, rows in itertools.product(("none", "finetune"), ("auto", None, 3)):
        trainer = load_config(minimal(trainer={"type": kind, "eval_batch_size": rows})).config.trainer
        assert trainer.eval_batch_size == rows


def test_all_problems_come_at_once_in_the_order_of_the_file(file, problems, golden):
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
    told = problems(file(text))
    assert [int(problem.split(":")[1]) for problem in told] == [1, 2, 5, 9, 11, 13, 14, 15, 16, 17, 19]
    golden("config/problems.txt", "\n".join(told))


SEED = "a whole number of at least 0 and below 4294967296"
WRONG_VALUES = [  # from line 8 on
    "random_seed: -1", "random_seed: true", "random_seed: 1.0", "dataset: ''", "dataset: 3", "dataset: 2001-01-01",
    "generation: 3", "trainer: 3", "trainer: finetuned", "adapter: {r: 4}",
    "adapter:\n  type: lora\n  target_modules: [1]", "precision: bf16", "generation:\n  top_p: .nan",
    "generation:\n  temperature: '1e-1'", "backend: {workers: 2}", "5: 3",
]  # fmt: skip
WRONG_FEATURES = [
    "[]", "3", "[3]", "[{type: text}]", "[{name: a, type: texts}]",
]  # fmt: skip


def test_one_wrong_value_gives_one_message(file, refusals):
    refusals("wrong_values.txt", lambda lines: load_config(file(f"{MINIMAL}{lines}\n")), WRONG_VALUES)
    whole = "base_model: m\ninput_features: {}\noutput_features: [{{name: answer, type: text}}]\n"
    refusals("wrong_features.txt", lambda features: load_config(file(whole.format(features))), WRONG_FEATURES)


def test_what_is_missing_is_told_with_its_meaning_and_a_mapping_names_its_keys_as_places(file):
    told = "base_model is missing … text … add it. A folder with a transformers causal language model, or its Hub id."
    with refused(f"config.yaml: {told}"):
        load_config(file("random_seed: 1\n"))
    with refused(f"base_model: {told}", "trainer.epochs: trainer.epochs is 0 … at least 1"):
        load_config({"trainer": {"type": "finetune", "epochs": 0}})


def test_keys_without_effect_are_noted(minimal, file):
    untrained = "trainer:\n  epochs: 5\n  learning_rate: 0.1\nprompt: {template: Hello}\n"
    older = "ludwig_version: 0.10\ntrainer:\n  type: finetune\n  learning_rate_scheduler: {wsd_decay_fraction: 0.2}\n"
    name = "trainer.learning_rate_scheduler"
    for source, words in [
        (minimal(trainer={"type": "finetune", "epochs": 5, "train_steps": 10}),
         ["trainer.epochs: … has no effect, trainer.train_steps decides"]),
        (file(MINIMAL + untrained), [
            "config.yaml:10: learning_rate, epochs have no effect with trainer.type: none; … finetune",
            "config.yaml:11: prompt.template names no column",
        ]),
        (lambda: file(MINIMAL + older), [
            f"config.yaml:11: {name}.wsd_decay_fraction is read as {name}.decay_fraction",
            "config.yaml:8: ludwig_version has no effect",
        ]),
    ]:  # fmt: skip
        loaded = load_config(source() if callable(source) else source)
        assert len(loaded.notes) == len(words)
        assert all(map(says, loaded.notes, words)), loaded.notes
    assert loaded.config.trainer.learning_rate_scheduler.decay_fraction == 0.2
    # What an override replaces is not the file's fault: so `brim compare` gives its runs their rows.
    epochs, samples = minimal(trainer={"type": "finetune", "epochs": 5}), "trainer.train_samples=9"
    assert load_config(epochs, [samples]).notes == ()
    (note,) = load_config(epochs, ["trainer.epochs=6", samples]).notes
    assert says(note, "override trainer.epochs=6: … has no effect, trainer.train_samples decides")


def test_overrides_set_values_and_make_sections(minimal):
    source = minimal(adapter="lora")
    overrides = ["trainer.type=finetune", "trainer.epochs=2", "trainer.epochs = 3", "trainer.gradient_clipping=null"]
    overrides += ["adapter.r=16", "adapter.target_modules=[q_proj, v_proj]", "trainer.learning_rate=1e-4"]
    overrides += ["input_features.0.name=question", "input_features.0.preprocessing.max_sequence_length=128"]
    config = load_config(source, [*overrides, "prompt.template='{a}: {b}'", "dataset=a=b.csv"]).config
    assert isinstance(config.trainer, FinetuneTrainer)
    assert (config.trainer.epochs, config.trainer.gradient_clipping, config.trainer.learning_rate) == (3, None, 0.0001)
    assert (config.adapter.type, config.adapter.r, config.adapter.target_modules) == ("lora", 16, ("q_proj", "v_proj"))
    (feature,) = config.input_features
    assert (feature.name, feature.type, feature.preprocessing.max_sequence_length) == ("question", "text", 128)
    assert (config.prompt.template, config.dataset) == ("{a}: {b}", "a=b.csv")
    assert source == minimal(adapter="lora")  # the document given is not changed
    assert load_config(source, ["adapter=", "random_seed =3"]).config.adapter is None
    source.pop("input_features")
    begun = ["input_features.0.name=q", "input_features.0.type=text"]
    assert load_config(source, begun).config.input_features[0].name == "q"


WRONG_OVERRIDES = [  # to the least configuration
    "trainer.epochs", "a..b=1", "parts/two.jsonl", "trainer.epoch=1", "base_model.x=1", "input_features.2.name=x",
    "input_features.name=x", "prompt.template={a} b: {c}",
]  # fmt: skip
BREAKING = [  # a file that loads without them
    "trainer.epochs=abc", "trainr.epochs=3", "special_tokens.pad_token=x", "quantization.llm_int8_threshold=-1",
    "output_features.0.name=prompt", "input_features.0.name=answer", "trainer.gradient_accumulation_steps=4",
    "trainer.batch_size=4", "generation.temperature=0", "generation.min_new_tokens=9",
    "generation.max_new_tokens=1",
]  # fmt: skip


def test_an_override_that_is_wrong_or_breaks_the_file_is_the_place(minimal, file, refusals):
    whole = file("""\
base_model: m
input_features: [{name: prompt, type: text}]
output_features: [{name: answer, type: text}]
trainer: {type: finetune, effective_batch_size: 9}
generation: {do_sample: true, min_new_tokens: 2, max_new_tokens: 4}
""")
    refusals("wrong_overrides.txt", lambda override: load_config(minimal(), (override,)), WRONG_OVERRIDES)
    refusals("overrides_that_break_a_file.txt", lambda override: load_config(whole, (override,)), BREAKING)


def test_overrides_come_after_the_file_and_what_cannot_be_read_hides_nothing(file):
    base = "config.yaml:1: base_model is 3 … text … put it in quotes"
    precision = "override precision=y: precision is 'y' … fp32"
    text = "base_model: 3\ninput_features: [{name: a, type: text}]\noutput_features: [{name: b, type: text}]\n"
    with refused(base, "override random_seed=x: random_seed is 'x'", precision):
        load_config(file(text), ("random_seed=x", "precision=y"))
    with refused(base, precision, "override random_seed: not an override"):
        load_config(file("base_model: 3\n"), ("random_seed", "precision=y"))


def test_a_missing_file_a_folder_and_a_name_that_cannot_be(file):
    file("")
    Path("folder").mkdir()
    for source, words in [
        ("other.yaml", "other.yaml: no such file … a YAML configuration … check the path"),
        ("org/some-model", "org/some-model: … a model of the Hub is named in the file, by base_model: org/some-model"),
        (Path("folder"), "folder: this folder is neither a run nor a model: it has no config.yaml and no config.json"),
        ("a\0b", "a\0b: cannot be read: embedded null byte"),
        ("x" * 300, "… cannot be read: File name too long … check the path and its permissions"),
    ]:
        with refused(words):
            load_config(source)


def test_a_models_folder_is_a_configuration_to_run_it_as_it_is_and_others_are_named(tmp_path):
    adapter, run = "this folder holds an adapter, not a model", "this is the folder of a run"
    for name, words in [("adapter_config.json", adapter), ("config.yaml", run)]:
        (tmp_path / name).write_text("{}")
        with refused(f"… {words}", by=ConfigError):
            load_config(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text("{}")
    config = load_config(tmp_path, ["generation.max_new_tokens=4"]).config
    assert (config.base_model, config.trainer.type, config.adapter) == (str(tmp_path), "none", None)
    assert config.generation.max_new_tokens == 4


def test_what_may_never_end_is_not_read(minimal, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    for name in ("/dev/zero", str(tmp_path / "pipe.yaml")):
        with refused(f"{name}: this is not a regular file\n"):
            load_config(name)
    with refused("… the file has more than 1,048,576 bytes\n"):
        load_config(tmp_path / "huge.yaml")
    source = minimal()
    source["trainer"] = source  # a mapping that contains itself
    with refused("trainer.trainer.trainer: too many nested values for a configuration"):
        load_config(source)


PAIRS = [{"q": "é", "a": "1"}, {"q": "y", "a": "2"}]
DATA = {
    "rows.jsonl": "\n".join(map(json.dumps, PAIRS)).encode(), "one row.jsonl": b'{"base_model": "m"}\n',
    "windows.csv": "q,a\né,1\n".encode("cp1252"), "sixteen.csv": "q,a\né,1\n".encode("utf-16"),
    "rows.parquet": b"PAR1\x15\x04\x00\xff", "rows.pq": b"PAR1\x15\x04\x00\xff", "large.tsv": b"q\ta\n" + b"x\t1\n" * MAX_BYTES,
    "list.json": json.dumps(PAIRS).encode("utf-16"), "lines.json": "\n".join(map(json.dumps, PAIRS)).encode(),
    "columns.json": json.dumps({"q": ["x", "y"], "a": ["1", "2"]}).encode(), "large.json": b"[" + b'"x",' * MAX_BYTES + b"1]",
}  # fmt: skip


def test_data_given_as_the_configuration_is_told_as_data_with_the_command(problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in DATA.items():
        Path(name).write_bytes(content)
        command = f"`brim train config.yaml --dataset {shlex.quote(name)}`"
        with refused(f"{name}: this is data, not a configuration … a YAML configuration … {command}"):
            load_config(name)
    for text in (
        '{"base_model": "m", "trainer": {"type": "none"}, "input_features": []}',
        '{"base_model": "m",\n "trainer": {"type" "none"}}',
    ):
        Path("c.json").write_text(text)  # a configuration in JSON is a configuration
        assert not any("this is data" in each for each in problems("c.json"))


def test_a_runs_trust_and_function_must_be_said_again_where_it_counts(minimal):
    where, key = Path("run/config.yaml"), "trainer.batch_increase_function"
    trainer = {"type": "finetune", "effective_batch_size": 8, "batch_increase_function": "evil:grow"}
    trust = f"{where}: trust_remote_code is true … add trust_remote_code=true … otherwise trust_remote_code=false"
    code = f"{where}: {key} names code … add {key}=evil:grow … otherwise {key}=null"
    remote, function = {"trust_remote_code": True}, {"trainer": trainer}
    for keys, overrides, begins, words in [
        ({}, [], True, []), (remote, ["trainer.type=none"], False, [trust]), (remote, ["trust_remote_code=true"], False, []),
        (function, [], True, [code]), (function, [f"{key}=evil:grow"], True, []),
        (function, [], False, []),  # predicting, and going on, call no function
        (remote | function, [], True, [trust, code]),
    ]:  # fmt: skip
        config = load_config(minimal(**keys)).config
        with refused(*words) if words else nullcontext():
            require_trust_said_again(config, overrides, where, begins=begins)


VALID = {
    "model_type": "llm", "base_model": "model", "backend": {"type": "local"},
    "input_features": [{"name": "prompt", "type": "text", "preprocessing": {"max_sequence_length": 8}}],
    "output_features": [{"name": "answer", "type": "text", "decoder": {"type": "text_extractor"}}],
    "prompt": {"template": "{question}"},
    "adapter": {"type": "lora", "target_modules": ["q"], "postprocessor": {"progressbar": False}},
    "trainer": {
        "type": "finetune", "batch_size": 2, "effective_batch_size": 8, "batch_search": "binary", "noise_scale_every": 5,
        "enable_gradient_checkpointing": "auto", "optimizer": {"type": "adam", "betas": [0.9, 0.99]},
        "batch_rampup": {"length": "0.1dur", "from": 2, "shape": "linear", "increment": 2}, "batch_beta2_scaling": True,
        "learning_rate_scheduler": {"decay": "wsd", "warmup_length": "5ba", "decay_length": "0.2dur"},
        "gradient_clipping": {"clipvalue": 1.0},
    },
    "generation": {"temperature": 0.5, "sequence_bias": [[[1], 2.0]], "eos_token_id": [1]},
    "preprocessing": {"split": {"type": "hash", "column": "c", "probabilities": [0.5, 0.25, 0.25]}},
    "memory": {"budget": "14 GiB", "margin": 0.05},
}  # fmt: skip


def _paths(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(item, (*path, key))


PATHS = [path for path in _paths(VALID) if path]
ODD = ["auto", "lora", "none", "dpo", "", "{a.b}", datetime.date(2001, 1, 1), b"x", {1}, object()]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def _problems(source, overrides=()):
    """The problems with which a configuration is refused; none if it loads. Any other exception fails the test."""
    try:
        load_config(source, overrides)
    except ConfigError as error:
        return error.problems
    return ()


@st.composite
def mutated(draw):
    """A valid configuration with a few values replaced, keys misspelt, or entries taken out."""
    config = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PATHS))
        at = config
        try:
            for part in parents:
                at = at[part]
            value = at[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
        if isinstance(at, str):
            continue  # an earlier change put a text there
        change = draw(st.sampled_from(["replace", "misspell", "remove", "add"]))
        if change == "replace" or not isinstance(at, dict):
            at[last] = draw(VALUES)
        elif change == "misspell":
            position = draw(st.integers(0, len(last)))
            at[last[:position] + draw(st.text(min_size=1, max_size=2)) + last[position:]] = at.pop(last)
        elif change == "remove":
            del at[last]
        elif isinstance(value, dict):
            value[draw(st.text(max_size=10))] = draw(VALUES)
    return config


@examples(300)
@given(mutated())
def test_a_changed_configuration_loads_or_is_refused_with_a_place(config):
    problems = _problems(config)
    assert all(problem.what and problem.where for problem in problems)
    assert not any("Input should be" in problem.what for problem in problems)


@examples(200)
@given(
    st.sampled_from([".".join(str(part) for part in path) for path in PATHS]) | st.text(max_size=10),
    st.text(max_size=20),
)
def test_any_override_is_taken_or_refused_with_a_place(key, value):
    assert all(problem.what and problem.where for problem in _problems(VALID, [f"{key}={value}"]))


@examples(300)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
    | st.text(alphabet="ab:-[]{}&*!'\"#|>\n ?%,<", max_size=40)
)
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert all(problem.what and problem.where.startswith(str(path)) for problem in _problems(path))
