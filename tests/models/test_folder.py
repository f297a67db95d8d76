"""Finding a base model, naming what its folder lacks, and what it may not ask for; libraries that are too old."""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest

from brim.errors import InputError, ModelError
from brim.models.folders import locate, require_floors
from brim.models.folders.model import FLOORS, context_length


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


def test_all_that_is_missing_is_named_at_once_and_random_weights_must_be_asked_for(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model.bin\), which can run code"):
        locate(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"holds no weights\n.*\n  fix: .*`initialize: random` to train from scratch"):
        locate(str(folder))
    assert not locate(str(folder), initialize="random").has_weights
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    missing = [problem.what for problem in refused(folder)]
    assert missing == [f"the base model's folder holds no {what}" for what in ("config.json", "weights", "tokenizer")]


def test_names_that_no_folder_has():
    for name, message in [
        ("llama-2-7b", r"write a Hub id in full, such as meta-llama/Llama-2-7b-hf"),  # Ludwig's short names
        ("x" * 5000, "no folder can have this name"),
        ("~nobody-of-this-name/x", "no folder can have this name"),
    ]:
        with pytest.raises(ModelError, match=message):
            locate(name)


def test_the_context_is_read_from_the_architecture():
    assert context_length({"max_position_embeddings": 4096}) == 4096
    assert context_length({"n_positions": 2048}) == 2048
    assert context_length({"text_config": {"max_position_embeddings": 77}}) == 77
    assert context_length({"model_type": "mamba"}) is None


def test_code_of_its_own_is_refused_with_what_to_do_instead(folder, monkeypatch):
    change(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (problem,) = refused(folder)
    assert problem.what == "the base model asks for its own code to be run (auto_map in config.json)"
    assert problem.where == str(folder / "config.json")
    assert problem.fix == "take auto_map out of config.json; transformers has a class of its own for llama"
    assert locate(str(folder), trust_remote_code=True).has_weights
    # Who asks only what a model is like needs none of its code.
    assert locate(str(folder), config_only=True).config["model_type"] == "llama"
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
        (problem,) = refused("org/name")
        fix = "`hf download org/name --local-dir DIR`, take auto_map out of DIR/config.json, set"
        assert problem.fix.startswith(fix)
    change(folder, "config.json", trust_remote_code=True)
    assert "(trust_remote_code in config.json)" in refused(folder, config_only=True)[0].what
    change(folder, "config.json", trust_remote_code=False, model_type="theirs")
    assert "(auto_map in config.json)" in refused(folder, config_only=True)[0].what
    (problem,) = refused(folder)
    assert problem.fix.startswith("choose a base model that transformers has a class for; otherwise read the code")


@pytest.mark.parametrize(
    ("file", "values", "what"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, r"\(auto_map in tokenizer_config"),
        ("config.json", {"text_config": {"auto_map": {"x": "y"}}}, r"\(text_config.auto_map in config.json\)"),
        ("config.json", {"custom_pipelines": {"x": {"impl": "evil.P"}}}, r"\(custom_pipelines in config.json\)"),
        ("generation_config.json", {"custom_generate": "org/name"}, r"\(custom_generate in generation_config.json\)"),
        ("config.json", {"attn_implementation": "org/kernel"}, "attn_implementation in config.json makes .* fetch"),
        ("config.json", {"_attn_implementation": "a/b@c:d"}, "_attn_implementation in config.json makes"),
        ("config.json", {"_attn_implementation": {"": "sdpa", "x": "o/k"}}, "_attn_implementation in config.json makes"),
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
        ("config.json", {"model_type": None}, "does not say what kind of model"),
        ("adapter_config.json", {"base_model_name_or_path": "evil/model"}, "holds an adapter, which names a base model"),
    ],
)  # fmt: skip
def test_what_is_refused(folder, file, values, what):
    change(folder, file, **values)
    with pytest.raises(ModelError, match=what) as caught:
        locate(str(folder))
    assert all(problem.where.startswith(str(folder)) and problem.fix for problem in caught.value.problems)


def test_a_generate_of_its_own_and_plain_kernels(folder):
    change(folder, "config.json", attn_implementation="flash_attention_2", _attn_implementation=None)
    assert locate(str(folder)).context_length == 128
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").touch()
    (problem,) = refused(folder)
    assert problem.what.endswith("(custom_generate/generate.py)")
    assert problem.fix == "remove the folder custom_generate"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files_are_named(folder, name):
    for content, what in {
        "[" * 100_000: "cannot be read: it is nested too deeply",
        "[]": "holds no mapping",
        "{": "cannot be read: Expecting",
        "\udcff": "cannot be read: .* codec can't decode",
    }.items():
        (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ModelError, match=f"{name} {what}"):
            locate(str(folder))


def test_an_index_names_files_of_the_folder(folder):
    (folder / "model.safetensors").unlink()
    named = [{"w": "../model.safetensors"}, {"w": "/etc/passwd"}, {"w": "pytorch_model.bin"}, {"w": 3}, []]
    for content in [*({"weight_map": names} for names in named), {}]:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json (names|does not say)"):
            locate(str(folder))


def test_links_that_leave_the_folder_and_pipes(folder, tmp_path):
    (folder / "x").symlink_to("x")  # to itself, which is no matter
    assert locate(str(folder)).has_weights
    (tmp_path / "token").write_text("secret")
    (folder / "merges.txt").symlink_to(tmp_path / "token")
    (problem,) = refused(folder)
    assert problem.what == "merges.txt is a link that leaves the folder"
    assert problem.fix == "copy the file there, or name the folder that the link leads to"
    (folder / "merges.txt").unlink()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is not a regular file"):  # and is not waited for
        locate(str(folder))


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


def test_libraries_that_are_too_old_are_named_and_the_package_asks_for_the_same(monkeypatch):
    require_floors()
    asked = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, (floor, _) in FLOORS.items():
        assert f'"{name}>={".".join(map(str, floor))}' in asked
    for transformers, accelerate, message in [
        ("5.2.9", "1.15.0", "transformers 5.2.9 is too old\n  expected: 5.3 or later: "),
        ("4.99", "1.15.0", "transformers 4.99 is too old\n"),
        ("5.10.dev0", "1.9.0", "accelerate 1.9.0 is too old\n"),
    ]:
        versions = {"transformers": transformers, "accelerate": accelerate}
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
        with pytest.raises(InputError) as caught:
            require_floors()
        assert len(caught.value.problems) == 1
        assert str(caught.value).startswith(f"this Python environment: {message}")
