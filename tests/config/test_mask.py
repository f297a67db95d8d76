"""Secrets do not reach files or messages."""

from __future__ import annotations

import pytest

from brim.config import mask_secrets, mask_text

HEX = "0a1B2c3D" * 5


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"token hf_{HEX} here", "token *** here"),
        (f"ghp_{HEX}", "***"),
        (f"github_pat_{HEX}", "***"),
        (f"sk-{HEX}", "***"),
        ("AKIA" + "A1B2C3D4" * 2, "***"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("https://user:pass@host/model", "https://***@host/model"),
        ("https://token@host/model", "https://***@host/model"),
        ("https://host/d.csv?a=1&access_token=xyz&b=2", "https://host/d.csv?a=1&access_token=***&b=2"),
        ("https://host/d.csv?X-Amz-Signature=abc", "https://host/d.csv?X-Amz-Signature=***"),
        ("me@example.org writes hf_model, sk-learn", "me@example.org writes hf_model, sk-learn"),
        ("models/llama-2-7b-hf", "models/llama-2-7b-hf"),
    ],
)
def test_texts(text, masked):
    assert mask_text(text) == masked


def test_keys_that_name_a_secret():
    masked = mask_secrets(
        {
            "password": "x",
            "api_key": "x",
            "HF_TOKEN": "x",
            "nested": [{"client-secret": "x"}],
            "pad_token_id": 3,
            "max_new_tokens": 5,
            "token": None,
            "validation_metric": "token_accuracy",
        }
    )
    assert masked == {
        "password": "***",
        "api_key": "***",
        "HF_TOKEN": "***",
        "nested": [{"client-secret": "***"}],
        "pad_token_id": 3,
        "max_new_tokens": 5,
        "token": None,
        "validation_metric": "token_accuracy",
    }
