"""Tiny models of many families of decoders, whose random weights are large enough that each token depends on all."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 100
# Keys that most families share; a family's own win.
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,  # where they are tied, the likeliest token is the last one again
}
_OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

# family -> (name of its classes, keys of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 6}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_GROUPED,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3": ("Qwen3", _GROUPED),
    "qwen3_moe": ("Qwen3Moe", {**_GROUPED, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gemma": ("Gemma", _GROUPED),
    "gemma2": ("Gemma2", {**_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3",
        {
            **_GROUPED,
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 7, "original_max_position_embeddings": 128}),
    "gpt2": ("GPT2", _OF_GPT2),
    "gpt_bigcode": ("GPTBigCode", _OF_GPT2),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2}),
    "gptj": ("GPTJ", {**_OF_GPT2, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**_OF_GPT2, "rotary_dim": 4}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.4}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon_rotary": ("Falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": ("Falcon", {"alibi": False, "multi_query": True}),
    "falcon_alibi": (
        "Falcon",
        {"alibi": True, "multi_query": False, "new_decoder_architecture": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 6}),
    "olmo": ("Olmo", {"num_key_value_heads": 2}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {"num_key_value_heads": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmoe": ("Olmoe", {"num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
    "cohere2": (
        "Cohere2",
        {"num_key_value_heads": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": ("Granite", {"num_key_value_heads": 2}),
    "granitemoe": ("GraniteMoe", {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "persimmon": ("Persimmon", {}),
    "biogpt": ("BioGpt", {}),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.4}),
    "ctrl": ("CTRL", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 128}),
    "openai_gpt": ("OpenAIGPT", _OF_GPT2),
    "glm": ("Glm", _GROUPED),
    "glm4": ("Glm4", _GROUPED),
    "smollm3": ("SmolLM3", {**_GROUPED}),
    "exaone4": ("Exaone4", {**_GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2}),
    "helium": ("Helium", _GROUPED),
    "arcee": ("Arcee", _GROUPED),
    "ernie4_5": ("Ernie4_5", _GROUPED),
    "seed_oss": ("SeedOss", _GROUPED),
    "gpt_oss": (
        "GptOss",
        {
            **_GROUPED,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "kv_lora_rank": 8,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba": ("Mamba", {"state_size": 4, "use_mambapy": False}),
    "mamba2": ("Mamba2", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    "falcon_mamba": ("FalconMamba", {"state_size": 4}),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32}),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"attention_window_size": 6, "num_key_value_heads": 1, "lru_width": 32, "num_hidden_layers": 3},
    ),
    "jamba": (
        "Jamba",
        {
            "num_key_value_heads": 2,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_key_value_heads": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "block_ff_dim": 48,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_GROUPED,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            **_GROUPED,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


def build(family: str) -> Any:
    """The family's model in fp32, in eval mode; always the same."""
    import transformers

    name, own = FAMILIES[family]
    configuration = getattr(transformers, f"{name}TextConfig", None) if name == "Gemma3" else None
    configuration = configuration or getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    torch.manual_seed(0)
    return model_class(configuration(**{**_COMMON, **own})).eval()
