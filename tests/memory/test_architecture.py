"""Parameters counted from config.json, against the models that transformers builds."""

import json
from pathlib import Path

import pytest

from brim.errors import ModelError
from brim.memory.closed_form import read_architecture

MODELS = Path(__file__).parents[2] / "benchmarks" / "data" / "memory" / "models"

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 64}
FAMILIES = [
    ("llama", SMALL),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", SMALL),
    ("ministral", {**SMALL, "head_dim": 16}),
    ("mixtral", {**SMALL, "num_local_experts": 4}),
    ("qwen2", SMALL),
    ("qwen3", {**SMALL, "head_dim": 16}),
    ("qwen3_moe", {**SMALL, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}),
    ("gemma", {**SMALL, "head_dim": 16}),
    ("gemma2", {**SMALL, "head_dim": 16}),
    ("gemma3_text", {**SMALL, "head_dim": 16}),
    ("olmo2", SMALL),
    ("smollm3", SMALL),
    ("granite", SMALL),
    ("phi", SMALL),
    ("phi3", SMALL),
    ("gpt2", GPT),
    ("gpt2", {**GPT, "n_inner": 96}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    ("gpt_neox", SMALL),
    ("starcoder2", SMALL),
]


def built(kind, sizes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize(("kind", "sizes"), FAMILIES, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(FAMILIES)])
def test_every_parameter_is_counted_and_every_linear_layer_has_its_shape(kind, sizes):
    model = built(kind, sizes)
    architecture = read_architecture({"model_type": kind, **sizes})
    assert architecture.is_known
    assert sum(architecture.parameters().values()) == sum(each.numel() for each in model.parameters())
    names = dict(model.named_parameters())
    layers = [name for name in names if ".2." in name and name.endswith("weight")]
    shapes = sorted((name.split(".")[-2], *sorted(names[name].shape)) for name in layers if names[name].ndim == 2)
    told = [(linear.name, *sorted((linear.inputs, linear.outputs))) for linear in architecture.linears]
    fused = {linear.name for linear in architecture.linears if linear.copies > 1}
    assert sorted(each for each in told if each[0] not in fused) == shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama--Llama-2-7b-hf", 6_738_415_616),
        ("mistralai--Mistral-7B-v0.1", 7_241_732_096),
        ("NousResearch--Llama-2-70b-hf", 68_976_648_192),
        ("meta-llama--Llama-3.2-3B", 3_212_749_824),
        ("TinyLlama--TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
    ],
)
def test_public_models_have_the_parameters_that_their_cards_state(name, parameters):
    config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    assert sum(read_architecture(config).parameters().values()) == parameters


def test_the_parts_of_llama_2_7b():
    config = json.loads((MODELS / "meta-llama--Llama-2-7b-hf" / "config.json").read_text(encoding="utf-8"))
    assert read_architecture(config).parameters() == {
        "embeddings": 32_000 * 4_096,
        "attention": 32 * 4 * 4_096**2,
        "mlp": 32 * 3 * 4_096 * 11_008,
        "experts": 0,
        "norms": (32 * 2 + 1) * 4_096,
        "head": 32_000 * 4_096,
    }


def test_the_text_of_a_model_that_sees_is_read():
    text = {"model_type": "gemma3_text", **SMALL, "head_dim": 16}
    assert read_architecture({"model_type": "gemma3", "text_config": text}) == read_architecture(text)


def test_an_unknown_family_is_taken_for_a_llama_and_says_so():
    other = read_architecture({"model_type": "newcomer", **SMALL})
    assert not other.is_known
    assert other.linears == read_architecture({"model_type": "llama", **SMALL}).linears


def test_a_missing_size_is_named():
    with pytest.raises(ModelError, match=r"config\.json does not say num_hidden_layers"):
        read_architecture({"model_type": "llama", **SMALL, "num_hidden_layers": None})
