"""Every family of causal language models: padded rows without a mask give the losses of rows alone."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from brim.data.tokens import TokenRow, collate
from brim.models import next_token_scores

SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GPT = {
    "vocab_size": 120,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": 4},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "gemma": {**SMALL, "head_dim": 8},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "phi": SMALL,
    "phi3": {**SMALL, "sliding_window": None},
    "granite": {**SMALL, "logits_scaling": 2.0},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
}

KERNELS = {"gemma2": "eager"}  # transformers has no SDPA for its capped scores


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_row(family):
    torch.manual_seed(0)
    architecture = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=KERNELS.get(family, "sdpa")).eval()
    generator = np.random.default_rng(0)
    rows = [
        TokenRow(
            key=key,
            input_ids=generator.integers(2, 120, length).astype(np.int32),
            supervised=np.arange(length) >= 2,
        )
        for key, length in enumerate([23, 9, 16])
    ]
    with torch.no_grad():
        together = next_token_scores(model, collate(rows, pad_id=1)).loss
        alone = torch.cat([next_token_scores(model, collate([row], pad_id=1)).loss for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
