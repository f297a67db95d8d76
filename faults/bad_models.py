"""Bad base models, adapters and runs, drawn by hypothesis: damaged files, and settings of wrong kinds and sizes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from faults.bad_input import ALL, WORKING, BadInput, Edit, Verb
from faults.workshop import ARCHITECTURE, CONFIG, as_yaml

MODELS, RUNS = "bad-models", "bad-runs"
_DEEP = b"[" * 100_000
# A file that is none of its kind, whatever that is.
GARBAGE = (b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff\xfe\x00", b"\x00" * 64, _DEEP, b'{"a":' * 100_000, b"{}")
_HEADER_LIES = (
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\x00" * 8,
    b"\x40" + b"\x00" * 7,
    b"\x00\x00\x00\x40\x00\x00\x00\x00",
)

# Values of config.json that nothing can be built from. transformers, which `brim check` does not import, sees most.
CONFIG_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("nope", 3, None, ["llama"], "", "bert_x", "../llama", "\x1b[31m"),
    "hidden_size": ("big", -1, 0, 1.5, None, 33, 10**30, True, [32]),
    "intermediate_size": ("big", -1, 0, [], 10**12),
    "num_hidden_layers": ("two", -1, 0, 10**9, 1.5, None, [2], 3),
    "num_attention_heads": ("x", 0, -4, 3, None, 10**9),
    "num_key_value_heads": ("x", 0, -4, 3),
    "vocab_size": ("x", 0, -1, 301, 10**12, 299),
    "max_position_embeddings": ("x", -1, []),
    "rope_parameters": (3, "x", {"rope_type": "nope"}, []),
    "rms_norm_eps": ("x", []),
    "hidden_act": ("nope", 3, "os.system", None),
    "dtype": ("float7", 3, "os.system"),
    "tie_word_embeddings": (False,),
    "quantization_config": ({"quant_method": "nope"}, 3, {"quant_method": "gptq", "bits": 4}, {"bits": 4}, []),
    "auto_map": ({"AutoConfig": "x.C"}, {"AutoModelForCausalLM": "x.M"}),
    "attn_implementation": ("org/kernel", 3),
    "transformers_weights": ("../x.safetensors", "x.bin"),
    "text_config": ({"num_hidden_layers": -1}, {"auto_map": {"AutoConfig": "x.C"}}),
}
# Read on the way, and not used by brim.
_HARMLESS = {("max_position_embeddings", "x"), ("num_hidden_layers", 1.5)}

TOKENIZER_CONFIGS: tuple[dict[str, Any], ...] = (
    {"eos_token": None},
    {"eos_token": "<|nope|>"},
    {"eos_token": 3},
    {"eos_token": []},
    {"eos_token": {}},
    {"eos_token": {"content": 3}},
    {"eos_token": {"text": "x"}},
    {"auto_map": {"AutoTokenizer": ["x.T", None]}},
)


def bad_models() -> st.SearchStrategy[BadInput]:
    """Of the base model, of its tokenizer, of the adapter that training begins with."""
    return st.one_of(_config_values(), _config_values(), _tokenizers(), _weights(), _files_of_base(), _adapters())


def bad_runs() -> st.SearchStrategy[BadInput]:
    """Of finished runs, by every verb that takes one."""
    return st.one_of(_files_of_runs(), _configs_of_runs(), _weights_of_runs())


def _base(name: str, *edits: Edit, verbs: tuple[Verb, ...] = ALL, may_pass: tuple[Verb, ...] = ()) -> BadInput:
    says = ("base", "config.json", "tokenizer")
    return BadInput(row=MODELS, name=name, edits=edits, says=says, verbs=verbs, may_pass=may_pass)


@st.composite
def _config_values(draw: st.DrawFn) -> BadInput:
    key = draw(st.sampled_from(sorted(CONFIG_VALUES)))
    value = draw(st.sampled_from(CONFIG_VALUES[key]))
    edit = Edit(path="base/config.json", content=json.dumps({**_BASE_CONFIG, key: value}).encode())
    return _base(f"config.json, {key}: {str(value)[:40]!r}", edit, may_pass=("check",))


@st.composite
def _tokenizers(draw: st.DrawFn) -> BadInput:
    if draw(st.booleans()):
        changes = draw(st.sampled_from(TOKENIZER_CONFIGS))
        named = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            **changes,
        }
        content = {**_BASE_CONFIG, "eos_token_id": None}
        edits = (
            Edit(path="base/tokenizer_config.json", content=json.dumps(named).encode()),
            Edit(path="base/config.json", content=json.dumps(content).encode()),
            Edit(path="base/generation_config.json", how="remove"),
        )
        return _base(f"tokenizer_config.json, {changes}", *edits)
    name, tokenizer = draw(st.sampled_from(_TOKENIZERS))
    return _base(f"tokenizer.json {name}", Edit(path="base/tokenizer.json", content=json.dumps(tokenizer).encode()))


@st.composite
def _weights(draw: st.DrawFn) -> BadInput:
    """Cut off, or a header that lies. The numbers themselves carry no digest."""
    file = "base/model.safetensors"
    lie = draw(st.sampled_from(_HEADER_LIES))
    size = draw(st.integers(0, 2_000))
    content = draw(
        st.sampled_from(
            [lie, lie + b"{}", lie + b"x" * 200, (size).to_bytes(8, "little") + b"{" * size, b"", b"\x80\x04."]
        )
    )
    verbs = WORKING
    return _base(
        f"model.safetensors of {len(content)} bytes: {content[:12]!r}…", Edit(path=file, content=content), verbs=verbs
    )


@st.composite
def _files_of_base(draw: st.DrawFn) -> BadInput:
    file = draw(
        st.sampled_from(
            ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
        )
    )
    edit, name = draw(_spoiled(f"base/{file}"))
    may_pass: tuple[Verb, ...] = ()
    if file == "model.safetensors":
        may_pass = ("check",)
    elif file in ("tokenizer_config.json", "generation_config.json"):
        may_pass = ALL  # what they hold may also stand elsewhere
    return _base(f"{file} {name}", edit, may_pass=may_pass)


ADAPTER_VALUES: tuple[dict[str, Any], ...] = (
    {"x": 1},
    {"r": 0},
    {"r": -1},
    {"r": "2"},
    {"r": 10**9},
    {"r": None},
    {"lora_alpha": "x"},
    {"lora_alpha": []},
    {"lora_dropout": 2},
    {"lora_dropout": "x"},
    {"bias": "x"},
    {"bias": 3},
    {"peft_type": "IA3"},
    {"peft_type": None},
    {"peft_type": ["LORA"]},
    {"target_modules": 3},
    {"target_modules": {}},
    {"target_modules": "(a+)+$"},
    {"target_modules": "("},
    {"target_modules": ["nope"]},
    {"target_modules": []},
    {"auto_mapping": {"parent_library": "os"}},
    {"megatron_core": "os", "megatron_config": {"a": 1}},
    {"eva_config": {"rho": 2}},
    {"loftq_config": {"loftq_bits": 4}},
    {"layer_replication": [[0, 10**9]]},
    {"rank_pattern": {"(a+)+": 2}},
    {"rank_pattern": {"q_proj": 10**9}},
    {"rank_pattern": 3},
    {"alpha_pattern": [3]},
    {"modules_to_save": "(a+)+"},
    {"modules_to_save": [3]},
    {"trainable_token_indices": [10**12]},
    {"task_type": 3},
    {"task_type": "NOPE"},
    {"revision": 3},
    {"use_dora": "x"},
    {"use_dora": True},
    {"fan_in_fan_out": "x"},
    {"init_lora_weights": 3},
    {"exclude_modules": "(a+)+"},
    {"layers_to_transform": "x"},
    {"layers_pattern": "(a+)+"},
    {"target_parameters": [3]},
    {"corda_config": {"cache_file": "x"}},
)


@st.composite
def _adapters(draw: st.DrawFn) -> BadInput:
    config = {**CONFIG, "adapter": {"type": "lora", "pretrained_adapter_weights": "./run/model"}}
    named = Edit(path="config.yaml", content=as_yaml(config).encode())
    says = ("run/model", "adapter")
    if draw(st.integers(0, 2)):
        changes = draw(st.sampled_from(ADAPTER_VALUES))
        edit = Edit(path="run/model/adapter_config.json", content=json.dumps({**_ADAPTER_CONFIG, **changes}).encode())
        name = f"adapter_config.json, {str(changes)[:60]}"
        may_pass: tuple[Verb, ...] = ("check",)
    else:
        file = draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
        edit, name = draw(_spoiled(f"run/model/{file}"))
        name, may_pass = f"{file} {name}", ()
    return BadInput(row=MODELS, name=name, edits=(named, edit), says=says, may_pass=may_pass)


_RUN_VERBS: tuple[Verb, ...] = ("evaluate", "predict", "resume", "export")


@st.composite
def _files_of_runs(draw: st.DrawFn) -> BadInput:
    file = draw(
        st.sampled_from(
            [
                "config.yaml",
                "plan.json",
                "model/adapter_config.json",
                "model/adapter_model.safetensors",
                "model/tokenizer.json",
                "model/manifest.json",
                "model/chat_template.jinja",
                "metrics.jsonl",
                "ledger.parquet",
                "environment.json",
                "checkpoints/step-00000002/manifest.json",
                "checkpoints/step-00000002/state.json",
                "checkpoints/step-00000002/model.safetensors",
                "model",
                "checkpoints",
            ]
        )
    )
    edit, name = draw(_spoiled(f"run/{file}"))
    needed = file == "config.yaml"
    return BadInput(
        row=RUNS,
        name=f"{file} {name}",
        edits=(edit,),
        model="run",
        says=("run", "config.yaml"),
        verbs=_RUN_VERBS,
        may_pass=() if needed else _RUN_VERBS,
        codes=(1, 2),
    )


@st.composite
def _configs_of_runs(draw: st.DrawFn) -> BadInput:
    changes = draw(st.sampled_from(_CHANGES))
    edit = Edit(path="run/config.yaml", content=as_yaml({**CONFIG, **changes}).encode())
    return BadInput(
        row=RUNS,
        name=f"config.yaml, {changes}",
        edits=(edit,),
        model="run",
        says=(),
        verbs=_RUN_VERBS,
        may_pass=_careless(changes),
        codes=(1, 2),
    )


def _careless(changes: dict[str, Any]) -> tuple[Verb, ...]:
    """Verbs that have no use for what was changed: a run brings its own adapter, and predicting needs no answers."""
    if "output_features" in changes:
        return ("predict", "export")
    return ("evaluate", "predict", "export") if changes.get("adapter", 3) != 3 else ()


_CHANGES: tuple[dict[str, Any], ...] = (
    {"base_model": "./nope"},
    {"base_model": "/etc"},
    {"base_model": "no-one/nothing"},
    {"x": 1},
    {"adapter": 3},
    {"prompt": {"template": "{x.__class__}"}},
    {"adapter": {"type": "lora", "pretrained_adapter_weights": "/etc"}},
    {"trust_remote_code": "yes"},
    {"output_features": [{"name": "nope", "type": "text"}]},
    {"chat": {"template": "/etc/passwd"}},
)


@st.composite
def _weights_of_runs(draw: st.DrawFn) -> BadInput:
    lie = draw(st.sampled_from([*_HEADER_LIES, b"", b"\x80\x04."]))
    edit = Edit(path="run/model/adapter_model.safetensors", content=lie)
    return BadInput(
        row=RUNS,
        name=f"adapter of {lie!r}",
        edits=(edit,),
        model="run",
        says=("run",),
        verbs=("evaluate", "predict", "export"),
        codes=(1, 2),
    )


@st.composite
def _spoiled(draw: st.DrawFn, path: str) -> tuple[Edit, str]:
    if draw(st.booleans()):
        garbage = draw(st.sampled_from(GARBAGE))
        return Edit(path=path, content=garbage), f"is {garbage[:12]!r} ({len(garbage):,} bytes)"
    how, target = draw(
        st.sampled_from(
            [
                ("remove", ""),
                ("folder", ""),
                ("fifo", ""),
                ("link", "/dev/zero"),
                ("link", "/etc/passwd"),
                ("link", "nowhere"),
            ]
        )
    )
    return Edit(path=path, how=how, target=target), f"is {how} {target}"  # type: ignore[arg-type]


_BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **ARCHITECTURE,
    "dtype": "float32",
}
_ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}
_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "truncation": None,
    "padding": None,
}
_END = {
    "id": 0,
    "content": "<|end|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
_TOKENIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("without a model", _EMPTY),
    ("of no known model", {**_EMPTY, "model": {"type": "Nope"}}),
    ("with no end of sequence", {**_EMPTY, "model": {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "a"}}),
    (
        "with merges of nothing",
        {**_EMPTY, "added_tokens": [_END], "model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}},
    ),
    (
        "with merges that are none",
        {**_EMPTY, "added_tokens": [_END], "model": {"type": "BPE", "vocab": {}, "merges": 3}},
    ),
    (
        "with an unknown token that is none",
        {**_EMPTY, "added_tokens": [_END], "model": {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "b"}},
    ),
    (
        "with tokens beyond the model's vocabulary",
        {
            **_EMPTY,
            "added_tokens": [_END],
            "model": {"type": "WordLevel", "vocab": {"a": 5000, "b": 5001}, "unk_token": "a"},
        },
    ),
    (
        "that replaces by a regular expression that is none",
        {
            **_EMPTY,
            "added_tokens": [_END],
            "normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
            "model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "a"},
        },
    ),
)
