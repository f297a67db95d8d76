"""What must be the same for a job to go on: everything that reaches a response, and nothing else."""

import random
import shutil

import pytest

import brim
from brim.session import open_session
from brim.workflows.prediction import job as module
from brim.workflows.prediction.job import differences, fingerprint


def session(config, **changes):
    return open_session(brim.Model({**config, **changes}).config)


def changed(config, *, split="full", **changes):
    """The names of what differs from the configuration as it is."""
    before = fingerprint(session(config), split=split)
    return [line.split(":")[0] for line in differences(before, fingerprint(session(config, **changes), split=split))]


def test_it_is_the_same_each_time_and_names_every_file(zero_shot):
    found = fingerprint(session(zero_shot), split="full")
    assert found == fingerprint(session(zero_shot), split="full")
    assert [name for name in found if name.startswith("the ")] == [
        f"the base model's {name}"
        for name in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"type": "none", "batch_size": 9}},
        {"dataset": "elsewhere.csv"},
        {"memory": {"budget": "1 GiB"}},
        {"preprocessing": {"split": "fixed", "on_bad_row": "drop", "on_overlong": "truncate"}},
        {"preprocessing": {"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}}},
    ],
    ids=str,
)
def test_what_reaches_no_response_may_change(zero_shot, changes):
    assert changed(zero_shot, **changes) == []


def test_the_split_counts_where_one_is_asked_for(zero_shot):
    split = {"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}}
    assert "preprocessing.split.type" in changed(zero_shot, split="test", preprocessing=split)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"generation": {"max_new_tokens": 6, "do_sample": True}}, ["generation.do_sample"]),
        ({"precision": "bf16-true"}, ["precision"]),
        ({"output_features": [{"name": "reply", "type": "text"}]}, ["output_features.0.name"]),
    ],
    ids=str,
)
def test_what_reaches_a_response_is_named(zero_shot, changes, names):
    assert changed(zero_shot, **changes) == names


def test_the_models_files_count_by_what_they_hold(zero_shot, tiny_base, tmp_path):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    assert changed(zero_shot, base_model=str(base)) == []
    (base / "tokenizer_config.json").write_text((base / "tokenizer_config.json").read_text() + " ")
    assert changed(zero_shot, base_model=str(base)) == ["the base model's tokenizer_config.json"]


def test_large_files_are_known_by_size_and_samples_of_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(module, "_SAMPLES", 8)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 20)
    content = random.Random(0).randbytes(1000)
    file = tmp_path / "weights"

    def digest(data):
        file.write_bytes(data)
        return module._digest_of_file(file)

    known = digest(content)
    assert known.startswith("1000 bytes, sampled: ")
    assert digest(content) == known
    for at in (0, 19, 140, 159, 980, 999):
        assert digest(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]) != known
    assert digest(content + b"\0") != known


def test_differences_are_told_in_words_and_of_files_by_name_alone():
    before = {"generation.top_p": 0.9, "the adapter's adapter_model.safetensors": "a", "gone": None, "same": [1]}
    now = {"generation.top_p": 1.0, "the adapter's adapter_model.safetensors": "b", "new": "x", "same": [1]}
    assert differences(before, now) == [
        "generation.top_p: 0.9 before, 1.0 now",
        "the adapter's adapter_model.safetensors",
        'new: null before, "x" now',
    ]
