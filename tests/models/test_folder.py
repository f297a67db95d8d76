"""Finding a base model, and naming what its folder lacks."""

import json
import shutil

import pytest

from brim.errors import ModelError
from brim.models import locate
from brim.models.folder import context_length


@pytest.fixture
def folder(tiny_base, tmp_path):
    return shutil.copytree(tiny_base, tmp_path / "base")


def test_a_whole_folder_is_found(tiny_base):
    found = locate(str(tiny_base))
    assert found.path == tiny_base.resolve()
    assert found.context_length == 128
    assert found.has_weights
    assert found.tokenizer_file == tiny_base.resolve() / "tokenizer.json"


def test_random_weights_must_be_asked_for(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights\n.*\n  fix: .*`initialize: random` to train from scratch"):
        locate(str(folder))
    assert not locate(str(folder), initialize="random").has_weights


def test_all_that_is_missing_is_named_at_once(folder):
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError) as caught:
        locate(str(folder))
    assert [problem.what for problem in caught.value.problems] == [
        "the base model's folder holds no config.json",
        "the base model's folder holds no weights",
        "the base model's folder holds no tokenizer",
    ]


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model.bin\), which can run code"):
        locate(str(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json cannot be read: Expecting property name"),
        ("[]", "config.json holds no mapping"),
        ("{}", "does not say what kind of model"),
    ],
)
def test_a_broken_config_is_named(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        locate(str(folder))


def test_a_misspelt_folder_gets_its_neighbour_as_a_hint(folder):
    with pytest.raises(ModelError, match=f"no such folder: .*bas\n.*\n  fix: did you mean {folder}?"):
        locate(str(folder.parent / "bas"))


def test_ludwigs_short_names_are_told_apart():
    with pytest.raises(ModelError, match=r"write a Hub id in full, such as meta-llama/Llama-2-7b-hf"):
        locate("llama-2-7b")


def test_a_hub_id_without_a_network_is_one_message():
    with pytest.raises(ModelError, match=r"some-org/some-model is not on this machine, and the Hub could not be asked"):
        locate("some-org/some-model")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_context_is_read_from_the_architecture(config, tokens):
    assert context_length(json.loads(json.dumps(config))) == tokens
