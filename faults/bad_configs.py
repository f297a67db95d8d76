"""Bad configurations, drawn by hypothesis: values, keys, texts, files and overrides that brim must refuse."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

from faults.bad_input import BadInput, Edit, Verb
from faults.workshop import CONFIG, as_yaml

ROW = "bad-configs"
NAN, INF = math.nan, math.inf
COUNTS: tuple[Any, ...] = (0, -1, 1.5, True, "two", "", [], {}, [1], NAN, INF, -INF)
SHARES: tuple[Any, ...] = (-0.1, 2, "x", True, NAN, INF, [], {})
FLAGS: tuple[Any, ...] = ("ja", 3, [], {}, "", 1.0)
SECTIONS: tuple[Any, ...] = (3, [], True, 1.5, [[]])

BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("ecd", 3, None, [], True, {}),
    "base_model": (
        3, [], {}, None, "", " ", "./nope", "a\nb", "x" * 5000, "y/" * 3000, "\0", "~nobody/x", "a/b/c", "//",
        "https://u:p@host/x", "rows.jsonl", "/dev/null", "\x1b[31mred", "..\\x", "org/" + "n" * 200, "-", "$(id)", "é",
    ),
    "input_features": (
        [], {}, "x", 3, [3], [{}], [{"name": "q"}], [{"name": "question", "type": "image"}], [[]],
        [{"name": "question", "type": "text"}, {"name": "b", "type": "text"}], [{"name": "", "type": "text"}],
        [{"name": None, "type": "text"}], [{"name": "answer", "type": "text"}], [{"name": "../../x", "type": "text"}],
    ),
    "output_features": ([], {}, "x", 3, [3], [{}], [{"name": "nope", "type": "text"}], [{"name": "\x1b]0;x\x07"}]),
    "prompt": (*SECTIONS, "x"),
    "prompt.template": (
        "{x.__class__}", "{question.__init__.__globals__}", "{question[0]}", "{0}", "{}", "{question!r}",
        "{question:>999999999}", "{question:{answer}}", "{", "}", "{nope}", 3, [], True, "{__task__}", "{ question }",
        "{question:}", "{answer}", "{{question}", "{" * 3000, "{a\nb}", "{question.a}", "{\x1b[2J}", "{_}",
        "{__class__}",
    ),
    "adapter": (*SECTIONS, "loraa", {"r": 8}, {"type": "ia3"}, {"type": ["lora"]}),
    "adapter.r": (*COUNTS, None, 10**30),
    "adapter.alpha": COUNTS,
    "adapter.dropout": (1, -0.1, 2, "x", True, NAN, INF, [], {}),
    "adapter.bias_type": ("some", 3, [], True),
    "adapter.target_modules": (3, True, [3], {}, "(a+)+$", "(", "a?" * 40, ".*" * 9 + "Z", "x" * 5000, [None], [[]]),
    "adapter.pretrained_adapter_weights": (3, [], True, "./nope", "base", "rows.jsonl", "", "\0", "~nobody/x", "a/b/c"),
    "adapter.init_lora_weights": (False, "pissa", 3, [], "eva", "corda"),
    "adapter.postprocessor": (*SECTIONS, {"x": 1}, {"merge_adapter_into_base_model": True}),
    "preprocessing": (*SECTIONS, "x"),
    "preprocessing.split": (
        3, "radnom", {"type": "x"}, [], {"type": "random", "probabilities": [1, 1, 1]}, {"type": "hash"}, True,
        {"type": "fixed", "column": "nope"}, {"type": "random", "probabilities": [0, 1, 0]},
        {"type": "random", "probabilities": [NAN, 0.5, 0.5]}, {"type": "random", "probabilities": "abc"},
        {"type": "stratify", "column": 3}, {"type": "hash", "column": "x" * 3000},
        {"type": "fixed", "column": "answer"},
    ),
    "preprocessing.on_overlong": ("drop it", 3, [], True, {}, ""),
    "preprocessing.on_bad_row": ("ignore", 3, [], True, {}, "truncate"),
    "preprocessing.sample_ratio": (*SHARES, 0),
    "preprocessing.sample_size": COUNTS,
    "preprocessing.global_max_sequence_length": COUNTS,
    "generation": (*SECTIONS, "x"),
    "generation.max_new_tokens": COUNTS,
    "generation.temperature": (-1, "hot", NAN, INF, [], True, {}),
    "generation.top_p": (-1, 2, "x", NAN, [], True),
    "generation.top_k": (-1, 1.5, "x", NAN, [], True),
    "generation.do_sample": FLAGS,
    "generation.num_beams": COUNTS,
    "generation.bad_words_ids": (3, "x", [3], [["x"]], [[-1]], {}),
    "trainer": (*SECTIONS, "dpo", "x"),
    "trainer.type": ("dpo", 3, None, "finetun", [], {}, True),
    "trainer.batch_size": (*COUNTS, None, "auto", 10**30, 3),
    "trainer.effective_batch_size": (*COUNTS, None, 7, 10**30 + 1),
    "trainer.gradient_accumulation_steps": (*COUNTS, 3, 10**30),
    "trainer.train_steps": COUNTS,
    "trainer.epochs": (*COUNTS, None),
    "trainer.learning_rate": (-1, 2, "high", True, NAN, INF, [], {}, "1e-4x"),
    "trainer.optimizer": (*SECTIONS, "adamm", {"type": "x"}, {"lr": 1}, {"type": "adam", "eps": -1}),
    "trainer.optimizer.betas": ([1], [0.9, 1.5], "a", 3, {}, [NAN, 0.9], [0.9, 0.9, 0.9], [True, False], [-0.1, 0.9]),
    "trainer.learning_rate_scheduler": (*SECTIONS, "x", {"x": 1}),
    "trainer.learning_rate_scheduler.decay": ("cosin", 3, [], True),
    "trainer.learning_rate_scheduler.warmup_fraction": SHARES,
    "trainer.gradient_clipping": (*SECTIONS, "x", {"clipnorm": -1}, {"clipnorm": NAN}, {"clipvalue": "x"}),
    "trainer.early_stop": (0, -2, 1.5, "x", True, NAN, []),
    "trainer.steps_per_checkpoint": (-1, 1.5, "x", True, NAN, []),
    "trainer.validation_field": ("nope", 3, [], True),
    "trainer.validation_metric": ("nope", 3, [], True),
    "trainer.on_nonfinite": ("ignore", 3, None, [], True),
    "trainer.enable_gradient_checkpointing": FLAGS,
    "quantization": (
        4, "nf4", [], True, {"bits": 5}, {"bits": "4"}, {"bits": None}, {"bits": 4, "x": 1}, {"bits": True},
        {"bits": 4, "quantization_type": "nf5"}, {"bits": NAN}, {"bits": 8, "llm_int8_threshold": "x"},
        {"bits": 4, "bnb_4bit_compute_dtype": "float7"}, {"bits": 4, "bnb_4bit_compute_dtype": "os.system"},
    ),
    "chat": (
        3, "x", [], True, {"messages": 3}, {"supervise": "some"}, {"template": "nope.jinja"}, {"x": 1}, {"tools": 3},
        {"messages": ""}, {"template": 3},
    ),
    "precision": ("fp8", 16, None, True, [], {}),
    "model_parameters": (*SECTIONS, "x", {"attn_implementation": "org/kernel"}, {"attn_implementation": 3}),
    "initialize": ("rand", 3, None, True, "random"),
    "random_seed": (-1, 2**32, 1.5, "x", True, None, NAN, []),
    "trust_remote_code": ("yes", 3, None, [], 1),
    "backend": (*SECTIONS, "dask", {"type": "horovod"}, {"type": "local", "x": 1}),
}  # fmt: skip

_DEEP = 100_000
_ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
_MERGES = "b0: &b0 {k: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
VALID = as_yaml(CONFIG)

TEXTS: dict[str, str | bytes] = {
    "nothing": b"",
    "blanks": "  \n\n",
    "a comment": "# nothing else\n",
    "null": "null\n",
    "a list": "- a\n- b\n",
    "a scalar": "42\n",
    "a text": "just words\n",
    "UTF-16": VALID.encode("utf-16"),
    "UTF-32": VALID.encode("utf-32"),
    "Latin-1": VALID.replace("Q: ", "caf\u00e9 ").encode("latin-1"),
    "a PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
    "a NUL byte": VALID.replace("llm", "ll\0m"),
    "a byte order mark in the middle": VALID.replace("question}", "ques\ufefftion}", 1),
    "a tab": "model_type: llm\ntrainer:\n\ttype: none\n",
    "aliases of aliases": VALID.rstrip()[:-1] + ", x: 1}\n---\n" + _ALIASES,
    "aliases that make billions": _ALIASES,
    "merges that make billions": _MERGES,
    "an alias of itself": "a: &a [*a]\n",
    "a merge of itself": "a: &a {<<: *a}\n",
    "a merge of a number": "<<: 3\n",
    "an unknown alias": "base_model: *nobody\n",
    "deep brackets": "a: " + "[" * _DEEP,
    "deep braces": "{a: " * _DEEP,
    "deep blocks": "".join(" " * n + f"k{n}:\n" for n in range(2_000)),
    "deep dashes": "- " * _DEEP + "x\n",
    "a Python object": "base_model: !!python/object/apply:os.system ['touch canary']\n",
    "a Python name": "base_model: !!python/name:os.system\n",
    "a new Python object": "a: !!python/object/new:type {args: ['x', [], {}]}\n",
    "a tag of nobody's": "base_model: !<tag:x> y\n",
    "a local tag": "base_model: !x y\n",
    "binary": "base_model: !!binary aGVsbG8=\n",
    "a set": "base_model: !!set {a, b}\n",
    "an ordered map": "base_model: !!omap [a: 1]\n",
    "two documents": VALID + "---\n" + VALID,
    "a directive": "%YAML 9.9\n---\nmodel_type: llm\n",
    "a directive of nobody's": "%FOO bar\n---\nmodel_type: llm\n",
    "a number of 5,000 digits": VALID.replace("0.01", "9" * 5_000),
    "a hexadecimal number of 100,000 digits": VALID.replace('"r": 2', '"r": 0x' + "f" * 100_000),
    "sixties": VALID.replace('"r": 2', '"r": ' + "1:" * 5_000 + "1"),
    "an impossible date": "random_seed: 2026-99-99\n",
    "a date": VALID.replace('"./base"', "2026-01-01"),
    "a key twice": VALID.replace('"model_type"', '"base_model": "x", "model_type"'),
    "a list for a key": "? [a, b]\n: c\n",
    "a mapping for a key": "? {a: b}\n: c\n",
    "a missing colon": VALID.replace('"base_model":', '"base_model"'),
    "a second colon": "base_model: a: b\n",
    "an open quote": VALID + '"',
    "a backslash": 'base_model: "C:\\models"\n',
    "a lone surrogate": 'base_model: "\\ud800"\nmodel_type: llm\n',
    "a surrogate as a key": '"\\ud800": 1\n',
    "a bell": VALID.replace("llm", "ll\am"),
    "100,000 keys": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "two million entries": "a: [" + "1," * 2_000_000 + "]\n",
    "a scalar of 20 MB": "base_model: " + "x" * 20_000_000 + "\n",
    "a line of brackets": "]" * 1000,
    "a wrong indentation": "trainer:\n  type: none\n epochs: 3\n",
    "a block of nothing": "prompt:\n  template: |\nbase_model\n",
    "a percent": "%\n",
    "an at sign": "base_model: @x\n",
    "a backtick": "base_model: `id`\n",
    "line ends of old Macs": "model_type: llm\rbase_model\r",
    "NEL": "model_type: llm\x85base_model: x\n",
}  # fmt: skip

OVERRIDES = (
    "=", "x", "a..b=1", ".=1", "trainer.=1", ".trainer=1", "=1", "trainer.epochs", "trainer.epochs=",
    "trainer.epochs=[",
    "trainer.epochs=!!python/name:os.system", "trainer.epochs=-1", "trainer.epochs.x=1", "trainer.type.x.y=1",
    "input_features=1", "input_features.0=1", "input_features.7.name=x", "input_features.-1.name=x",
    "input_features.x=1", "base_model.x=1", "trainer={", "trainer.batch_size=" + "9" * 5000, "a" * 5000 + "=1",
    "." * 5000 + "=1", "a." * 5000 + "b=1", "trainer=" + "[" * 5000, "trainer.epochs=\t1\t:", "é=1", "\x1b[31m=1",
    "trainer.epochs=1e999", "trainer.epochs=.nan", "<<=1", "input_features.99999999999999999999.name=x",
    "trainer.epochs=&a [*a]", "trainer=null", "base_model=", "base_model=\x7f", "prompt.template={x.__class__}",
    "adapter.target_modules=(a+)+$", "trainer.optimizer=&a {b: *a}", "__class__=1", "trainer.__class__=1",
    "model_config=1", "trainer.model_fields_set=1", "\ud800=1".encode("utf-8", "surrogatepass").decode("latin-1"),
    "input_features.²=1", "input_features.٣.name=x", "input_features.0.name.0=1",
)  # fmt: skip
_NO_FAULT = ("trainer=null",)

CONTRADICTIONS: tuple[tuple[str, ...], ...] = (
    ("quantization={bits: 4}", "adapter=null"),
    ("quantization={bits: 8}", "initialize=random", "adapter=null"),
    ("quantization={bits: 4}", "adapter.bias_type=all"),
    ("chat={}",),
    ("chat={messages: m}", "prompt.template=null"),
    ("trainer.batch_size=4", "trainer.effective_batch_size=6"),
    ("trainer.batch_size=4", "trainer.gradient_accumulation_steps=3", "trainer.effective_batch_size=8"),
    ("generation.do_sample=true", "generation.temperature=0"),
    ("generation.min_new_tokens=9", "generation.max_new_tokens=2"),
    ("trainer.steps_per_checkpoint=1", "trainer.checkpoints_per_epoch=2"),
    ("preprocessing.sample_size=3", "preprocessing.sample_ratio=0.5"),
    ("trainer.learning_rate=0.001", "trainer.learning_rate_scheduler.eta_min=0.5"),
    ("trainer.learning_rate_scheduler.decay=wsd", "trainer.learning_rate_scheduler.warmup_fraction=0.95"),
    ("adapter.bias_type=all", "precision=bf16-true"),
    ("initialize=random",),
    ("output_features.0.name=question",),
    ("trainer.optimizer={type: sgd, nesterov: true}",),
    ("preprocessing.split={type: random, probabilities: [0.5, 0.5, 0.5]}",),
    ("preprocessing.global_max_sequence_length=1",),
    ("preprocessing.split.column=question",),
)


def bad_configs() -> st.SearchStrategy[BadInput]:
    """Every kind alike often, but for the values, of which there are most."""
    return st.one_of(
        _values(), _values(), _values(), _unknown_keys(), _texts(), _broken_texts(), _overrides(), _files()
    )


@st.composite
def _values(draw: st.DrawFn) -> BadInput:
    key = draw(st.sampled_from(sorted(BAD_VALUES)))
    value = draw(st.sampled_from(BAD_VALUES[key]))
    config = copy.deepcopy(CONFIG)
    *sections, last = key.split(".")
    at = config
    for section in sections:
        at = at.setdefault(section, {})
    at[last] = value
    text = json.dumps(config, indent=1).replace("NaN", ".nan").replace("Infinity", ".inf")
    return BadInput(
        row=ROW,
        name=f"{key}: {_short(value)}",
        edits=(Edit(path="config.yaml", content=text.encode()),),
        says=("config.yaml:", *key.split("."), "rows.jsonl"),
        may_pass=_careless(key),
    )


def _careless(key: str) -> tuple[Verb, ...]:
    """Verbs that may have no use for a key's column: all rows need no split, and predicting needs no answers."""
    careless: dict[str, tuple[Verb, ...]] = {
        "preprocessing.split": ("evaluate", "predict"),
        "output_features": ("predict",),
    }
    return careless.get(key, ())


@st.composite
def _unknown_keys(draw: st.DrawFn) -> BadInput:
    sections = ((), ("trainer",), ("adapter",), ("generation",), ("preprocessing",), ("preprocessing", "split"))
    path = draw(st.sampled_from((*sections, ("prompt",), ("input_features", 0), ("trainer", "optimizer"))))
    config = copy.deepcopy(CONFIG)
    at: Any = config
    for part in path:
        at = at[part]
    near = draw(st.booleans())
    key = draw(st.sampled_from(sorted(at))) + draw(st.sampled_from("sx_ -9")) if near else draw(_NEW_KEYS)
    at[key] = "x" if near else draw(_ANY)
    text = json.dumps(config, indent=1).replace("NaN", ".nan").replace("Infinity", ".inf")
    name = f"unknown key {key!r} in {'.'.join(map(str, path)) or 'the root'}"
    return BadInput(
        row=ROW, name=name, edits=(Edit(path="config.yaml", content=text.encode()),), says=("config.yaml:",)
    )


@st.composite
def _texts(draw: st.DrawFn) -> BadInput:
    name = draw(st.sampled_from(sorted(TEXTS)))
    text = TEXTS[name]
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return BadInput(
        row=ROW,
        name=f"text: {name}",
        edits=(Edit(path="config.yaml", content=content),),
        says=("config.yaml", "rows.jsonl"),
    )


@st.composite
def _broken_texts(draw: st.DrawFn) -> BadInput:
    """Cut off, which leaves the first brace open, or with a control character, which no YAML may hold."""
    content = VALID.encode()
    at = draw(st.integers(1, len(content) - 3))
    if draw(st.booleans()):
        name, content = f"cut after byte {at}", content[:at]
    else:
        byte = draw(st.sampled_from([*range(9), 11, 12, *range(14, 32), 127, 0x80, 0xFF]))
        name, content = f"byte 0x{byte:02x} at {at}", content[:at] + bytes([byte]) + content[at:]
    return BadInput(row=ROW, name=name, edits=(Edit(path="config.yaml", content=content),), says=("config.yaml",))


@st.composite
def _overrides(draw: st.DrawFn) -> BadInput:
    if draw(st.booleans()):
        override = draw(st.sampled_from([each for each in OVERRIDES if each not in _NO_FAULT]))
        return BadInput(
            row=ROW, name=f"override {_short(override)}", overrides=(override,), says=("override", "rows.jsonl")
        )
    several = draw(st.sampled_from(CONTRADICTIONS))
    keys = tuple(part for each in several for part in each.partition("=")[0].split("."))
    may_pass: tuple[Verb, ...] = ()
    if several in (("quantization={bits: 4}", "adapter=null"), ("preprocessing.split.column=question",)):
        may_pass = ("evaluate", "predict")  # only training needs an adapter on a quantised base, or a split
    elif several == ("preprocessing.global_max_sequence_length=1",):
        may_pass = ("predict",)  # there is nothing to learn, and a token to go on from
    name = f"overrides {' '.join(several)}"
    return BadInput(row=ROW, name=name, overrides=several, says=("override", *keys), may_pass=may_pass)


@st.composite
def _files(draw: st.DrawFn) -> BadInput:
    edit, name = draw(
        st.sampled_from(
            [
                (Edit(path="config.yaml", how="remove"), "no file"),
                (Edit(path="config.yaml", how="folder"), "a folder"),
                (Edit(path="config.yaml", how="fifo"), "a pipe that nobody writes to"),
                (Edit(path="config.yaml", how="link", target="config.yaml"), "a link to itself"),
                (Edit(path="config.yaml", how="link", target="/dev/null"), "a link to /dev/null"),
                (Edit(path="config.yaml", how="link", target="/dev/zero"), "a link to /dev/zero"),
                (Edit(path="config.yaml", how="link", target="rows.jsonl"), "a link to data"),
                (Edit(path="config.yaml", how="link", target="base/model.safetensors"), "a link to weights"),
            ]
        )
    )
    return BadInput(row=ROW, name=f"config.yaml is {name}", edits=(edit,), says=("config.yaml",))


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_NEW_KEYS = st.text(min_size=1, max_size=20).map(lambda text: f"{text}'")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"
