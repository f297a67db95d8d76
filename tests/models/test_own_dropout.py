"""The base model's own dropout."""

import pytest
from transformers import AutoConfig

from brim.models import own_dropout


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        ("opt", {"dropout": 0.1}),
        ("phi3", {}),
        ("falcon", {}),
    ],
)
def test_of_families(family, expected):
    assert own_dropout(AutoConfig.for_model(family).to_dict()) == expected


def test_of_the_text_part_and_not_of_other_heads():
    text = {"attention_dropout": 0.2, "resid_pdrop": 0.0, "classifier_dropout": 0.3, "hidden_dropout": None}
    assert own_dropout({"dropout": 0, "text_config": text}) == {"attention_dropout": 0.2}
