"""Architectures of causal language models, tiny in width and deep enough that layers are left out of a recording.

One of each kind of layer: families whose layers do the same in other words (such as Helium and Llama) are left out.
"""

import json

IDS = {"vocab_size": 120, "bos_token_id": 0, "eos_token_id": 0}
SMALL = {
    **IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
HEADS = {**SMALL, "head_dim": 8}
SLIDING = {**HEADS, "sliding_window": 4}
DEEP = {**SMALL, "num_hidden_layers": 20}
GPT = {**IDS, "n_embd": 32, "n_layer": 9, "n_head": 4, "n_positions": 64}
STATES = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 9, "state_size": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # attention of DeepSeek
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
DEEPSEEK = {**SMALL, **LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
GATED_DELTA = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
HYBRID = ["mamba", "mamba", "mamba", "attention"] * 4 + ["mamba"] * 2
FAMILIES = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": 4},
    "mixtral": {**SMALL, **EXPERTS},
    "qwen2": SMALL,  # with biases
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, **EXPERTS},
    "qwen2_moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 16},
    "gemma2": {**SLIDING, "num_hidden_layers": 11, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SLIDING, "num_hidden_layers": 26, "query_pre_attn_scalar": 8},
    "phi": SMALL,
    "phi3": {**SMALL, "sliding_window": None},
    "phimoe": {**SMALL, **EXPERTS},
    "gpt_bigcode": GPT,
    "granitemoe": {**SMALL, **EXPERTS},
    "granitemoeshared": {**SMALL, **EXPERTS, "shared_intermediate_size": 16},
    "granitemoehybrid": {
        **SMALL, **EXPERTS, **MAMBA, "num_hidden_layers": 18, "layers_block_type": HYBRID, "layer_types": HYBRID,
        "shared_intermediate_size": 16,
    },
    "gpt2": GPT,
    "gpt_neo": {
        **IDS, "hidden_size": 32, "num_layers": 12, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 6]], "window_size": 4,
    },
    "gpt_neox": SMALL,
    "gptj": {**GPT, "rotary_dim": 4},
    "falcon": {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "starcoder2": SMALL,
    "olmo2": SMALL,
    "olmo3": {**DEEP, "sliding_window": 4},
    "olmoe": {**SMALL, **EXPERTS},
    "cohere2": {**DEEP, "sliding_window": 4},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {**SMALL, "n_layer": 9, "n_head": 4},
    "mpt": {"vocab_size": 120, "d_model": 32, "n_layers": 9, "n_heads": 4, "max_seq_len": 64},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {**SLIDING, **EXPERTS, "num_hidden_layers": 10},
    "llama4_text": {
        **DEEP, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "attention_chunk_size": 8,
    },
    "smollm3": {**DEEP, "no_rope_layers": [1, 1, 1, 0] * 5},
    "qwen3_next": {**DEEP, **EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**DEEP, **GATED_DELTA},
    "glm4_moe": {**SMALL, **LATENT, **EXPERTS, "head_dim": 8, "first_k_dense_replace": 1},
    "exaone4": {**DEEP, "sliding_window": 4, "sliding_window_pattern": 4},
    "ernie4_5_moe": {
        **SMALL, **EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "apertus": SMALL,
    "diffllama": SMALL,
    "xglm": {**SMALL, "d_model": 32, "num_layers": 9, "attention_heads": 4, "ffn_dim": 48},
    "mamba": STATES,
    "mamba2": {**STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "falcon_h1": {**HEADS, **MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "jamba": {
        **SMALL, "num_hidden_layers": 32, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**SMALL, **MAMBA, "num_hidden_layers": 12, "attn_layer_indices": [2, 5, 8, 11]},
    "zamba2": {
        **SMALL, "num_hidden_layers": 12, "layers_block_type": (["linear_attention"] * 5 + ["hybrid"]) * 2,
        "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1,
    },
    "recurrent_gemma": {**SMALL, "num_hidden_layers": 15, "lru_width": 32, "attention_window_size": 8},
    "lfm2": {**SMALL, "num_hidden_layers": 15, "full_attn_idxs": [2, 5, 8, 11, 14]},
    "rwkv": {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 9, "context_length": 64},
    "minimax": {**HEADS, **EXPERTS, "num_hidden_layers": 11, "block_size": 8},
    "dots1": {**SMALL, **LATENT, **EXPERTS, "head_dim": 8},
    "flex_olmo": {**SMALL, **EXPERTS},
    "doge": SMALL,
    "bitnet": SMALL,
    "afmoe": {**SMALL, **EXPERTS},
    "ctrl": {"vocab_size": 120, "n_positions": 64, "n_embd": 32, "dff": 48, "n_layer": 9, "n_head": 4},
}  # fmt: skip


DBRX = {  # its shapes depend on values
    "vocab_size": 120, "d_model": 32, "n_heads": 4, "n_layers": 9, "max_seq_len": 64,
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
}  # fmt: skip


def write_folder(folder, family, **changes):
    """Write a base model's folder that holds nothing but a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, "dtype": "bfloat16", **FAMILIES.get(family, {}), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
