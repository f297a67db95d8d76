"""The rule of what a layer keeps, against what autograd saves of real models."""

import pytest

from brim.memory.closed_form import kept_in_a_layer, read_architecture
from brim.memory.closed_form.activations import Arithmetic
from brim.memory.closed_form.architecture import Lora

ROWS, TOKENS = 2, 32
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "residual_dropout": 0,
    "embedding_dropout": 0,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 128, "bos_token_id": 0}
GPT2 = {**GPT2, "eos_token_id": 0, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
ADAPTER = Lora(r=8, target_modules=("q_proj", "up_proj", "down_proj"), dropout=False)


def saved_by_a_layer(kind, sizes, *, dtype, lora, attention):
    """Bytes a token that autograd saves in one more layer, weights apart."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def saved(layers):
        depth = {"n_layer" if "n_layer" in sizes else "num_hidden_layers": layers}
        config = AutoConfig.for_model(kind, **{**sizes, **depth})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()
        if lora is not None:
            settings = peft.LoraConfig(
                r=lora.r, target_modules=list(lora.target_modules), lora_dropout=0, task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, settings)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage  # held, so that no other one gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.zeros(ROWS, TOKENS, dtype=torch.long), use_cache=False)
        return sum(storage.nbytes() for storage in kept.values())

    return (saved(3) - saved(2)) / (ROWS * TOKENS)


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "lora", "attention"),
    [
        ("llama", SMALL, "float32", None, "sdpa"),
        ("llama", SMALL, "bfloat16", None, "sdpa"),
        ("llama", SMALL, "bfloat16", None, "eager"),
        ("llama", SMALL, "bfloat16", ADAPTER, "sdpa"),
        ("llama", SMALL, "float32", ADAPTER, "eager"),
        ("qwen3", {**SMALL, "head_dim": 16}, "bfloat16", None, "sdpa"),
        ("gemma", {**SMALL, "head_dim": 16}, "bfloat16", None, "sdpa"),
        ("gpt2", GPT2, "bfloat16", None, "eager"),
        ("gpt2", GPT2, "float32", None, "sdpa"),
        ("starcoder2", SMALL, "bfloat16", None, "sdpa"),
    ],
)
def test_the_rule_is_within_a_hundredth_of_what_is_saved(kind, sizes, dtype, lora, attention):
    import torch

    each = 4 if dtype == "float32" else 2
    parts = kept_in_a_layer(
        read_architecture({"model_type": kind, **sizes}),
        Arithmetic(compute_bytes=each, residual_bytes=each, autocast=False),
        lora=lora,
        attention=attention,
        sequence_length=TOKENS,
    )
    saved = saved_by_a_layer(kind, sizes, dtype=getattr(torch, dtype), lora=lora, attention=attention)
    # What is left out: a few numbers a token, such as the norms' variances.
    assert 0 <= saved - sum(part.bytes_per_token for part in parts) <= 0.01 * saved


def test_dropout_adds_its_mask_of_a_byte():
    architecture = read_architecture({"model_type": "llama", **SMALL})
    arithmetic = Arithmetic(compute_bytes=2, residual_bytes=2, autocast=False)

    def adapter(dropout):
        lora = Lora(r=8, target_modules=("q_proj", "down_proj"), dropout=dropout)
        parts = kept_in_a_layer(architecture, arithmetic, lora=lora, attention="sdpa", sequence_length=8)
        return {part.name: part for part in parts}["adapter"]

    assert adapter(False).bytes_per_token == (64 + 176) * 4 + 2 * 8 * 4
    assert adapter(True).bytes_per_token == adapter(False).bytes_per_token + 64 + 176
    assert adapter(True).formula == "240 × 4 B + 2 × 8 × 4 B + 240 × 1 B"
