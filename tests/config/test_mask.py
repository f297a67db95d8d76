"""Secrets do not reach files or messages, and what is none stays as it is."""

from __future__ import annotations

import pytest

from brim.config import load_config, mask_secrets, mask_text
from brim.errors import ConfigError

ALPHANUMERIC = "0a1B2c3D" * 12
HF = "hf_" + ALPHANUMERIC[:34]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"token {HF} here", "token *** here"),
        ("ghp_" + ALPHANUMERIC[:36], "***"),
        ("github_pat_" + ALPHANUMERIC[:82], "***"),
        ("glpat-" + ALPHANUMERIC[:20], "***"),
        ("sk-" + ALPHANUMERIC[:48], "***"),
        ("sk-proj-" + ALPHANUMERIC, "***"),
        ("sk-ant-api03-" + ALPHANUMERIC, "***"),
        ("AKIA" + "A1B2C3D4" * 2, "***"),
        ("xoxb-123456789012-abcdefghijkl", "***"),
        (f"Bearer {JWT}.", "Bearer ***."),
        ("https://user:pass@host/model", "https://***@host/model"),
        (f"https://{HF}@host/model", "https://***@host/model"),
    ],
)
def test_secrets_are_masked(text, masked):
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "me@example.org writes hf_model, sk-learn",
        "models/llama-2-7b-hf",
        "/mnt/hf_checkpoints/llama",
        "hf_" + "a" * 33,
        "hf_" + "a" * 35,
        "my_" + HF,
        "/data/sk-imaging-experiments-2024/rows.csv",
        "https://host/d.csv?api_key={question}",
        "https://{user}:{password}@host",
        "https://host:8080/a@b",
        "Bearer in mind",
        "password: {password}",
    ],
)
def test_what_is_no_secret_stays(text):
    assert mask_text(text) == text


def test_paths_keep_their_parts():
    values = {"base_model": f"/models/{HF}", "dataset": f"/d/{HF}", "prompt": {"template": HF}, "x": [HF, 3, None]}
    assert mask_secrets(values) == {**values, "prompt": {"template": "***"}, "x": ["***", 3, None]}
    assert mask_secrets({"dataset": "https://u:p@host/d"}) == {"dataset": "https://***@host/d"}


def test_the_environments_secrets_are_masked_whatever_they_look_like(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "quite ordinary words")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a/b+c" * 4)
    monkeypatch.setenv("SHORT_TOKEN", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a value of no secrecy")
    assert mask_text("x quite ordinary words y short a value of no secrecy") == "x *** y short a value of no secrecy"
    assert mask_text("?key=a%2Fb%2Bc" + "a%2Fb%2Bc" * 3) == "?key=***"
    assert mask_secrets({"dataset": "/d/quite ordinary words/x"}) == {"dataset": "/d/***/x"}
    with pytest.raises(ConfigError, match="a secret stands in the configuration, in base_model") as caught:
        load_config({**SOURCE, "base_model": "/models/quite ordinary words"})
    assert "ordinary" not in str(caught.value)


SOURCE = {
    "base_model": "model",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
}


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"prompt": {"template": f"{{question}} {HF}"}}, "prompt.template"),
        ({"base_model": f"https://me:{HF}@host/model"}, "base_model"),
        ({"adapter": {"type": "lora", "target_modules": ["q", HF]}}, "adapter.target_modules.1"),
        ({"output_features": [{"name": HF, "type": "text"}]}, "output_features.0.name"),
    ],
)
def test_a_secret_in_the_configuration_is_refused_and_not_repeated(keys, where):
    with pytest.raises(ConfigError) as caught:
        load_config({**SOURCE, **keys})
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.what == f"a secret stands in the configuration, in {where}"
    assert "environment" in problem.fix
    assert HF not in str(caught.value)


@pytest.mark.parametrize(
    "override", [f"prompt.template={HF}", f"trainer.epochs={HF}", f"trainer.type={HF}", f"x={HF}", f"{HF}"]
)
def test_no_message_repeats_a_secret_of_an_override(override):
    with pytest.raises(ConfigError) as caught:
        load_config(SOURCE, [override])
    assert HF not in str(caught.value)


@pytest.mark.parametrize(
    "keys", [{"precision": HF}, {"adapter": HF}, {"api_key": HF}, {"trainer": {"type": "finetune", "epochs": HF}}]
)
def test_no_message_repeats_a_secret_of_a_wrong_value(keys):
    with pytest.raises(ConfigError) as caught:
        load_config({**SOURCE, **keys})
    assert HF not in str(caught.value)
