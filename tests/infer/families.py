"""Tiny models of many families of decoders, whose random weights are large enough that each token depends on all.

Also what they have to write, found without an engine, and memory that runs out while they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import Response
from brim.models import precision

VOCABULARY = 100
# Keys that most families share; a family's own win. Where embeddings are tied, the likeliest token is the last one again.
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.4, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_TWO = {"num_key_value_heads": 2}
_GROUPED = {**_TWO, "head_dim": 8}
_SLIDES = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
_ONE_EXPERT = {"num_local_experts": 2, "num_experts_per_tok": 1}
_SIZE_OF_EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
_DEEPSEEK = {
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
# By transformers' name, or that and a variant's; own keys.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("phi", "gpt_neox", "persimmon", "biogpt"), _COMMON),
    **dict.fromkeys(("stablelm", "olmo", "olmo2", "cohere", "granite", "nemotron"), _TWO),
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "glm", "glm4", "smollm3", "helium", "arcee"), _GROUPED),
    **dict.fromkeys(("ernie4_5", "seed_oss"), _GROUPED),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt"), _OF_GPT2),
    "gptj": {**_OF_GPT2, "rotary_dim": 4},
    "codegen": {**_OF_GPT2, "rotary_dim": 4},
    "olmo3": {**_TWO, **_SLIDES},
    "cohere2": {**_TWO, **_SLIDES},
    "mistral": {**_GROUPED, "sliding_window": 6},
    "mixtral": {**_GROUPED, **_LOCAL_EXPERTS, "sliding_window": None},
    "qwen2_moe": {**_GROUPED, **_EXPERTS, **_SIZE_OF_EXPERTS},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "moe_intermediate_size": 16},
    "gemma2": {**_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_GROUPED, **_SLIDES, "query_pre_attn_scalar": 8},
    "phi3": {**_TWO, "sliding_window": 7, "original_max_position_embeddings": 128},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.4},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon rotary": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon multi-query": {"alibi": False, "multi_query": True},
    "falcon alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "starcoder2": {**_TWO, "sliding_window": 6},
    "olmoe": {**_TWO, **_EXPERTS},
    "granitemoe": {**_TWO, **_LOCAL_EXPERTS},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 128},
    "exaone4": {**_GROUPED, **_SLIDES},
    "gpt_oss": {**_GROUPED, **_LOCAL_EXPERTS, **_SLIDES},
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 8},
    "mamba": {"state_size": 4, "use_mambapy": False},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "falcon_mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {
        "attention_window_size": 6, "num_key_value_heads": 1, "lru_width": 32, "num_hidden_layers": 3,
    },
    "jamba": {
        **_TWO, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "bamba": {**_TWO, **_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_TWO, **_MAMBA, **_ONE_EXPERT, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "falcon_h1": {**_GROUPED, **_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {
        **_TWO, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        **_GROUPED, **_SIZE_OF_EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "num_experts": 2, "num_experts_per_tok": 1,
    },
    "minimax": {**_GROUPED, **_ONE_EXPERT, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
}  # fmt: skip
# Keep a state other than keys and values, or nothing, so that transformers' `generate` writes for them.
RECURRENT = {
    *("openai-gpt", "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba"),
    *("granitemoehybrid", "falcon_h1", "lfm2", "qwen3_next", "minimax"),
}
# Of them, those whose batches are wrong: transformers' RWKV mixes up states and reads padding, its MiniMax reads padding.
MISLED = {"rwkv", "minimax"}
# Packed rows get other scores than rows alone, or their attention is not exchangeable.
UNFIT = {
    *("openai-gpt", "gptj", "codegen", "gemma2", "gpt_neo", "gpt_neox_japanese", "bloom", "mpt", "xglm", "gpt_oss"),
    *("falcon rotary", "falcon multi-query", "falcon alibi"),  # their attention is not transformers' registry's
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "granitemoehybrid", "falcon_h1"),
    *("lfm2", "qwen3_next", "minimax"),  # their state goes from one row to the next
}
MOST_NEW = 6
# For tests of eleven prompts and a model whose vocabulary has 300 tokens; see conftest.py.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "num_beams": 1,
    "pad_token_id": 1,
    "eos_token_id": [0],
}
ON_CPU: dict[str, Any] = {"device": torch.device("cpu"), "precision": precision("fp32")}


def build(family: str) -> Any:
    """The family's model in fp32, in eval mode; always the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    configuration = AutoConfig.for_model(family.partition(" ")[0], **{**_COMMON, **FAMILIES[family]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configuration).eval()


def rows_of(
    lengths: Sequence[int], *, first_key: int = 0, vocabulary: int = VOCABULARY, num_prompt_tokens: int = 1 << 30
) -> TokenRows:
    """Rows of random tokens; those behind the prompt are supervised."""
    generator = np.random.default_rng(0)
    return TokenRows.from_rows(
        TokenRow(
            key=first_key + number,
            input_ids=generator.integers(2, vocabulary, length).astype(np.int32),
            supervised=np.arange(length) >= num_prompt_tokens,
        )
        for number, length in enumerate(lengths)
    )


def prompts() -> TokenRows:
    return rows_of([3, 14, 9, 1, 9, 2, 11, 5, 7])


def alone(model: Any, row: TokenRow, *, most: int = MOST_NEW, end: Collection[int] = ()) -> list[int]:
    """The oracle: argmax after argmax, without padding, cache or transformers' generate."""
    tokens, new = row.input_ids.tolist(), []
    while len(new) < most:
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([[*tokens, *new]]), use_cache=False).logits[0, -1].argmax())
        if token in end:
            break
        new.append(token)
    return new


def ended(texts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """A token that ends some texts, early and late, but not all; and the texts without it and what follows."""
    places = {token: [text.index(token) for text in texts if token in text] for text in texts for token in text}
    end = max(places, key=lambda token: (len(places[token]) < len(texts), len(set(places[token]))))
    return end, [text[: text.index(end)] if end in text else text for text in texts]


def texts(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


@contextmanager
def runs_out(model: Any, when: Callable[[int, int, int], bool]) -> Iterator[SimpleNamespace]:
    """Let memory run out in the passes for which `when(rows, tokens of each, number)` holds. Gives how many did."""
    found = SimpleNamespace(num_passes=0, times=0)

    def check(module: Any, args: Any, given: dict[str, Any]) -> None:
        found.num_passes += 1
        rows, tokens = given["input_ids"].shape
        if when(rows, tokens, found.num_passes):
            found.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with model.register_forward_pre_hook(check, with_kwargs=True):
        yield found
