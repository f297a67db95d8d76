"""A tiny model in fp32 and rows of very different lengths."""

import numpy as np
import pytest
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.models import precision

LENGTHS = [3, 60, 9, 1, 31, 9, 2, 44, 17, 5, 28]


@pytest.fixture(scope="module")
def model():
    """Large random weights, so that each token depends on all before it and no two are nearly as likely."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def on_cpu():
    return {"device": torch.device("cpu"), "precision": precision("fp32")}


@pytest.fixture
def prompts():
    generator = np.random.default_rng(0)
    return TokenRows.from_rows(
        TokenRow(
            key=100 + number,
            input_ids=generator.integers(2, 300, length).astype(np.int32),
            supervised=np.zeros(length, dtype=bool),
        )
        for number, length in enumerate(LENGTHS)
    )


@pytest.fixture
def rows(prompts):
    """The same tokens, of which all but the first are to be learned."""
    return TokenRows.from_rows(
        TokenRow(key=row.key, input_ids=row.input_ids, supervised=np.arange(len(row.input_ids)) > 0) for row in prompts
    )
