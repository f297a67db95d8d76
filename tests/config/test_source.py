"""Files that are no configuration."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from brim.config import load_config
from brim.config.yaml import MAX_BYTES
from brim.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.yaml: the configuration is empty\n  fix: give at least base_model and the features"),
        (b"# nothing\n", "config.yaml: the configuration is empty\n  fix: give at least base_model and the features"),
        (b"- a\n", "config.yaml:1: the configuration is no mapping\n  expected: lines of the form `key: value`"),
        (b"text", "config.yaml:1: the configuration is no mapping\n  expected: lines of the form `key: value`"),
        (b"a: 1\nb: \xff\n", "config.yaml:2: byte 0xff is not UTF-8\n  fix: save the file as UTF-8"),
        ("base_model: m".encode("utf-16"), "config.yaml:1: byte 0xff is not UTF-8\n  fix: save the file as UTF-8"),
    ],
)
def test_what_is_no_configuration(file, problems, content, message):
    assert problems(file(content)) == [message]


def test_a_missing_file_a_folder_and_a_name_that_cannot_be(file, problems, tmp_path):
    file("")
    assert problems("other.yaml") == [
        "other.yaml: no such file\n  expected: a YAML configuration\n  fix: check the path"
    ]
    (of_the_hub,) = problems("org/some-model")
    assert of_the_hub.endswith("check the path; a model of the Hub is named in the file, by base_model: org/some-model")
    Path("folder").mkdir()
    (problem,) = problems(Path("folder"))
    assert problem.startswith(
        "folder: this folder is neither a run nor a model: it has no config.yaml and no config.json"
    )
    assert problems("a\0b") == ["a\0b: cannot be read: embedded null byte\n  fix: check the path and its permissions"]


def test_a_models_folder_is_a_configuration_to_run_it_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    loaded = load_config(tmp_path, ["generation.max_new_tokens=4"])
    assert (loaded.config.base_model, loaded.config.trainer.type) == (str(tmp_path), "none")
    assert (loaded.config.adapter, loaded.config.generation.max_new_tokens) == (None, 4)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "this folder holds an adapter, not a model"),
        ("config.yaml", "this is the folder of a run"),
        ("model.safetensors", "this folder is neither a run nor a model"),
    ],
)
def test_what_a_folder_is_that_holds_no_model(tmp_path, file, message):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_an_unreadable_file(file, problems):
    Path(file("a: 1")).chmod(0)
    assert problems("config.yaml") == [
        "config.yaml: cannot be read: Permission denied\n  fix: check the path and its permissions"
    ]


def test_what_may_never_end_is_not_read(problems, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    for name in ("/dev/zero", str(tmp_path / "pipe.yaml")):
        (problem,) = problems(name)
        assert problem.startswith(f"{name}: this is no regular file\n")
    (problem,) = problems(str(tmp_path / "huge.yaml"))
    assert "the file has more than 1,048,576 bytes\n" in problem


def test_a_byte_order_mark_is_no_fault(file):
    features = "input_features: [{name: a, type: text}]\noutput_features: [{name: b, type: text}]\n"
    loaded = load_config(file(b"\xef\xbb\xbfbase_model: m\r\n" + features.encode()))
    assert loaded.config.base_model == "m"


def test_a_mapping_that_contains_itself_is_refused(minimal, problems):
    source = minimal()
    source["trainer"] = source
    assert problems(source) == ["trainer.trainer.trainer: too many nested values for a configuration"]


PAIRS = [{"q": "é", "a": "1"}, {"q": "y", "a": "2"}]
DATA = {
    "rows.jsonl": "\n".join(map(json.dumps, PAIRS)).encode(),
    "one row.jsonl": b'{"base_model": "m"}\n',
    "windows.csv": "q,a\né,1\n".encode("cp1252"),
    "sixteen.csv": "q,a\né,1\n".encode("utf-16"),
    "rows.parquet": b"PAR1\x15\x04\x00\xff",
    "rows.pq": b"PAR1\x15\x04\x00\xff",
    "large.tsv": b"q\ta\n" + b"x\t1\n" * MAX_BYTES,
    "list.json": json.dumps(PAIRS).encode("utf-16"),
    "lines.json": "\n".join(map(json.dumps, PAIRS)).encode(),
    "columns.json": json.dumps({"q": ["x", "y"], "a": ["1", "2"]}).encode(),
    "large.json": b"[" + b'"x",' * MAX_BYTES + b"1]",
}


@pytest.mark.parametrize(("name", "content"), DATA.items(), ids=DATA)
def test_data_given_as_the_configuration_is_told_as_data_with_the_command(
    problems, tmp_path, monkeypatch, name, content
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert problems(name) == [
        f"{name}: this is data, not a configuration\n  expected: a YAML configuration\n"
        f"  fix: name the configuration first: `brim train config.yaml --dataset {shlex.quote(name)}`"
    ]


def test_a_configuration_in_json_is_a_configuration(problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"base_model": "m", "trainer": {"type": "none"}, "input_features": []}')
    assert not any("this is data" in each for each in problems("c.json"))
    Path("c.json").write_text('{"base_model": "m",\n "trainer": {"type" "none"}}')
    assert not any("this is data" in each for each in problems("c.json"))
