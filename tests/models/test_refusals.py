"""What a base model's folder may not ask for."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from brim.errors import ModelError
from brim.models import locate


@pytest.fixture
def folder(tiny_base, tmp_path):
    return shutil.copytree(tiny_base, tmp_path / "base")


def change(folder, name, **values):
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def refused(folder, **settings):
    with pytest.raises(ModelError) as caught:
        locate(str(folder), **settings)
    return caught.value.problems


def test_code_of_an_architecture_that_transformers_has(folder):
    change(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (problem,) = refused(folder)
    assert problem.what == "the base model asks for its own code to be run (auto_map in config.json)"
    assert problem.where == str(folder / "config.json")
    assert problem.fix == "take auto_map out of config.json; transformers has a class of its own for llama"
    assert locate(str(folder), trust_remote_code=True).has_weights


def test_code_of_an_architecture_that_transformers_lacks(folder):
    change(folder, "config.json", model_type="theirs", auto_map={"AutoConfig": "evil.C"})
    (problem,) = refused(folder)
    assert problem.fix.startswith("choose a base model that transformers has a class for; otherwise read the code")


def test_who_asks_only_what_a_model_is_like_needs_none_of_its_code(folder):
    change(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert locate(str(folder), config_only=True).config["model_type"] == "llama"
    change(folder, "config.json", trust_remote_code=True)
    assert "(trust_remote_code in config.json)" in refused(folder, config_only=True)[0].what
    change(folder, "config.json", trust_remote_code=False, model_type="theirs")
    assert "(auto_map in config.json)" in refused(folder, config_only=True)[0].what


def test_code_of_a_model_on_the_hub(folder, monkeypatch):
    change(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    (problem,) = refused("org/name")
    assert problem.fix == (
        "`hf download org/name --local-dir DIR`, take auto_map out of DIR/config.json, set base_model: DIR; "
        "transformers has a class of its own for llama"
    )


@pytest.mark.parametrize(
    ("file", "values", "what"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, r"\(auto_map in tokenizer_config"),
        ("config.json", {"trust_remote_code": True}, r"\(trust_remote_code in config.json\)"),
        ("config.json", {"text_config": {"auto_map": {"x": "y"}}}, r"\(text_config.auto_map in config.json\)"),
        ("config.json", {"custom_pipelines": {"x": {"impl": "evil.P"}}}, r"\(custom_pipelines in config.json\)"),
        ("generation_config.json", {"custom_generate": "org/name"}, r"\(custom_generate in generation_config.json\)"),
        ("config.json", {"attn_implementation": "org/kernel"}, "attn_implementation in config.json makes .* fetch"),
        ("config.json", {"_attn_implementation": "a/b@c:d"}, "_attn_implementation in config.json makes"),
        (
            "config.json",
            {"_attn_implementation": {"": "sdpa", "x": "o/k"}},
            "_attn_implementation in config.json makes",
        ),
        ("config.json", {"use_kernels": True}, "use_kernels in config.json makes"),
        ("config.json", {"kernel_config": {"x": "o/k:l"}}, "kernel_config in config.json makes"),
        ("config.json", {"transformers_weights": "../w.safetensors"}, "names weights under another name"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000"),
        ("config.json", {"num_hidden_layers": True}, "num_hidden_layers in config.json is True"),
        ("config.json", {"vocab_size": "300"}, "vocab_size in config.json is '300'"),
        ("config.json", {"hidden_size": 10**400}, "hidden_size in config.json is a number of too many digits"),
        ("config.json", {"hidden_size": 0}, "hidden_size in config.json is 0"),
        ("config.json", {"text_config": {"num_layers": -1}}, "text_config.num_layers in config.json is -1"),
        ("config.json", {"dtype": "float7"}, "dtype in config.json is 'float7'"),
        ("config.json", {"text_config": {"torch_dtype": 3}}, "text_config.torch_dtype in config.json is 3"),
        ("config.json", {"model_type": "\x1b[2J"}, "does not say what kind of model"),
        ("config.json", {"model_type": ["llama"]}, "does not say what kind of model"),
        (
            "adapter_config.json",
            {"base_model_name_or_path": "evil/model"},
            "holds an adapter, which names a base model",
        ),
    ],
)
def test_what_is_refused(folder, file, values, what):
    change(folder, file, **values)
    with pytest.raises(ModelError, match=what) as caught:
        locate(str(folder))
    assert all(problem.where.startswith(str(folder)) and problem.fix for problem in caught.value.problems)


def test_plain_kernels_are_no_matter(folder):
    change(folder, "config.json", attn_implementation="flash_attention_2", _attn_implementation=None)
    assert locate(str(folder)).context_length == 128


def test_a_generate_of_its_own(folder):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").touch()
    (problem,) = refused(folder)
    assert problem.what.endswith("(custom_generate/generate.py)")
    assert problem.fix == "remove the folder custom_generate"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
        ("[]", "holds no mapping"),
        ("{", "cannot be read: Expecting"),
        ("\udcff", "cannot be read: .* codec can't decode"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files_are_named(folder, name, content, what):
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=f"{name} {what}"):
        locate(str(folder))


@pytest.mark.parametrize(
    "content",
    [
        {"weight_map": {"w": "../model.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": "pytorch_model.bin"}},
        {"weight_map": {"w": 3}},
        {"weight_map": []},
        {},
    ],
)
def test_an_index_names_files_of_the_folder(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json (names|does not say)"):
        locate(str(folder))


def test_links_that_leave_the_folder(folder, tmp_path):
    (tmp_path / "token").write_text("secret")
    (folder / "merges.txt").symlink_to(tmp_path / "token")
    (problem,) = refused(folder)
    assert problem.what == "merges.txt is a link that leaves the folder"
    assert problem.fix == "copy the file there, or name the folder that the link leads to"


def test_links_within_the_folder_and_the_hubs_cache_are_no_matter(folder, tmp_path):
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "w")
    (folder / "model.safetensors").symlink_to("weights/w")
    assert locate(str(folder)).has_weights
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    snapshot = shutil.copytree(folder, cache / "snapshots" / "abc")
    (snapshot / "config.json").rename(cache / "blobs" / "1")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert locate(str(snapshot)).context_length == 128


def test_a_link_to_itself_is_no_matter(folder):
    (folder / "x").symlink_to("x")
    assert locate(str(folder)).has_weights


def test_a_pipe_is_not_waited_for(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is no regular file"):
        locate(str(folder))


def test_names_that_no_folder_can_have():
    for name in ("x" * 5000, "~nobody-of-this-name/x"):
        with pytest.raises(ModelError, match="no folder can be called so"):
            locate(name)
