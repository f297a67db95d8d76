"""List the models and runs of benchmarks/memory_gpu.py: architectures from 0.1 to 8 B parameters, as config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

Method = Literal["full", "lora", "lora_attention", "qlora", "none"]

_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "gpt2": {  # 0.12 B
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        **_TOKENS,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **_TOKENS,
    },
    "tinyllama-1.1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **_TOKENS,
    },
    "gemma-2b": {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "vocab_size": 256000,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **_TOKENS,
    },
    "mixtral-small": {  # 0.8 B
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **_TOKENS,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **_TOKENS,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **_TOKENS,
    },
}

_SMALL: Mapping[str, int] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 16,
    "n_positions": 128,
    "max_position_embeddings": 128,
}
_SMALL_TOKENS = 32  # of the longest row, where the models are small


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold one model run in one way."""

    architecture: str
    method: Method
    precision: str
    rows: int  # of a micro-batch
    tokens: int  # of the longest row
    does: Literal["train", "infer"] = "train"
    checkpointing: bool = False
    chunked_loss: bool = False
    packed: bool = False  # rows of one length, whose tokens fill a micro-batch up
    attention: str = "sdpa"
    optimizer: str = "adamw"
    num_micro_batches: int = 1
    step_lengths: tuple[tuple[int, ...], ...] = ()  # of each row of each step; none: all have `tokens`
    num_steps: int = 3
    new_tokens: int = 0  # to generate
    records: bool = False  # keep the allocations, to compare one by one

    @property
    def name(self) -> str:
        flags = [
            self.architecture,
            self.does,
            self.method,
            self.precision,
            f"{self.rows}x{self.tokens}",
            *(["checkpointing"] if self.checkpointing else []),
            *(["chunked loss"] if self.chunked_loss else []),
            *(["packed"] if self.packed else []),
            *([self.attention] if self.attention != "sdpa" else []),
            *([self.optimizer] if self.optimizer != "adamw" else []),
            *([f"{self.num_micro_batches} micro-batches"] if self.num_micro_batches > 1 else []),
            *(["uneven"] if len(self.step_lengths) == 1 else []),
            *(["varying"] if len(self.step_lengths) > 1 else []),
            *(["recorded"] if self.records else []),
        ]
        return " ".join(flags)

    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Return tokens of each row of each step."""
        return self.step_lengths or ((self.tokens,) * (self.rows * self.num_micro_batches),)

    def settings(self) -> dict[str, Any]:
        """Return brim's configuration, but for the base model's folder."""
        lora: dict[str, Any] = {"type": "lora", "r": 16, "target_modules": "all-linear"}
        if "num_local_experts" in ARCHITECTURES[self.architecture]:
            lora["dropout"] = 0.0  # PEFT adapts experts without it only
        if self.method == "lora_attention":
            lora["target_modules"] = _ATTENTION[ARCHITECTURES[self.architecture]["model_type"]]
        adapted = self.method not in ("full", "none")
        trainer = {
            "type": "finetune",
            "batch_size": self.rows,
            "gradient_accumulation_steps": self.num_micro_batches,
            "learning_rate": 1e-5,
            "optimizer": {"type": self.optimizer},
            "enable_gradient_checkpointing": self.checkpointing,
            "chunked_loss": self.chunked_loss,
            "packing": self.packed,
        }
        return {
            "precision": self.precision,
            "model_parameters": {"attn_implementation": self.attention},
            **({"adapter": lora} if adapted else {}),
            **({"quantization": {"bits": 4}} if self.method == "qlora" else {}),
            "trainer": trainer if self.does == "train" else {"type": "none", "chunked_loss": self.chunked_loss},
            "generation": {"max_new_tokens": max(self.new_tokens, 1)},
        }


_ATTENTION: Mapping[str, list[str]] = {
    "gpt2": ["c_attn"],
    **{kind: ["q_proj", "k_proj", "v_proj", "o_proj"] for kind in ("qwen2", "llama", "gemma", "mixtral", "mistral")},
}


def grid() -> Iterator[Case]:
    """Yield every case, one of each model in turn, so that each has been run when time is up."""
    in_turn = zip_longest(
        _seven_billion("mistral-7b", records=True),
        *map(_thorough, ("gpt2", "tinyllama-1.1b", "qwen2-0.5b")),
        _experts("mixtral-small"),
        _large_vocabulary("gemma-2b"),
        _seven_billion("llama-3.1-8b", records=False),
    )
    return (case for cases in in_turn for case in cases if case is not None)


def small(case: Case) -> Case:
    """Return the same case for a model and shapes of some thousand times fewer bytes."""

    def shorter(tokens: int) -> int:
        return max(4, tokens * _SMALL_TOKENS // max(case.tokens, *(max(step) for step in case.lengths())))

    return replace(
        case,
        rows=min(case.rows, 4),
        tokens=shorter(case.tokens),
        step_lengths=tuple(tuple(map(shorter, step)) for step in case.step_lengths),
        new_tokens=min(case.new_tokens, 4),
    )


def architecture_of(case: Case, *, small: bool) -> dict[str, Any]:
    """Return its config.json."""
    config = dict(ARCHITECTURES[case.architecture])
    if not small:
        return config
    shrunk = {key: value for key, value in _SMALL.items() if key in config}
    if "num_key_value_heads" in config:
        shrunk["num_key_value_heads"] = 1 if config["num_key_value_heads"] == 1 else 2
    return {**config, **shrunk}


def _thorough(name: str) -> Iterator[Case]:
    longest = 1024 if name == "gpt2" else 2048
    full = Case(architecture=name, method="full", precision="bf16-mixed", rows=4, tokens=512)
    lora = replace(full, method="lora", precision="bf16-true")
    yield from [replace(full, records=True)] if name != "qwen2-0.5b" else []
    yield full
    yield replace(full, rows=1, tokens=longest)
    yield replace(full, rows=8, tokens=64)
    yield replace(full, precision="bf16-true", checkpointing=True, tokens=1024)
    yield replace(full, precision="fp32", rows=2)
    yield replace(full, precision="fp16-mixed", rows=2)
    yield replace(full, chunked_loss=True)
    yield replace(full, num_micro_batches=2)
    yield replace(full, optimizer="adafactor", rows=2)
    yield replace(full, optimizer="sgd", rows=2)
    yield replace(full, optimizer="adamw_8bit", rows=2)
    yield replace(lora, records=True, rows=2)
    yield replace(lora, tokens=1024)
    yield replace(lora, packed=True)
    yield replace(lora, packed=True, chunked_loss=True, method="full", rows=16, tokens=128)
    yield replace(lora, tokens=1024, checkpointing=True)
    yield replace(lora, tokens=1024, checkpointing=True, chunked_loss=True)
    yield replace(lora, precision="bf16-mixed", rows=2)
    yield replace(lora, precision="fp32", rows=2)
    yield replace(lora, method="lora_attention", attention="eager", rows=2)
    yield replace(lora, tokens=1000, step_lengths=((1000, 700, 333, 50),))
    yield replace(
        lora, tokens=1024, step_lengths=varying(rows=4, longest=1024), num_steps=len(varying(rows=4, longest=1))
    )
    yield replace(lora, method="qlora", tokens=1024, checkpointing=True)
    yield replace(lora, method="none", does="infer", tokens=512, new_tokens=64)
    yield replace(lora, method="none", does="infer", rows=1, tokens=longest - 32, new_tokens=32)
    yield replace(lora, method="none", does="infer", precision="fp32", tokens=256, new_tokens=32, attention="eager")


def _large_vocabulary(name: str) -> Iterator[Case]:
    full = Case(architecture=name, method="full", precision="bf16-true", rows=2, tokens=512)
    lora = replace(full, method="lora")
    yield full
    yield replace(full, checkpointing=True, chunked_loss=True)
    yield replace(lora, records=True)
    yield replace(lora, tokens=2048, checkpointing=True)
    yield replace(lora, tokens=2048, checkpointing=True, chunked_loss=True)
    yield replace(lora, method="lora_attention", attention="eager")
    yield replace(lora, method="none", does="infer", rows=4, tokens=512, new_tokens=64)


def _experts(name: str) -> Iterator[Case]:
    full = Case(architecture=name, method="full", precision="bf16-mixed", rows=2, tokens=512)
    yield replace(full, records=True)
    yield full
    yield replace(full, checkpointing=True, tokens=1024)
    yield replace(full, method="lora_attention", precision="bf16-true", tokens=1024)
    yield replace(full, method="lora", precision="bf16-true", tokens=1024, checkpointing=True)
    yield replace(full, method="none", does="infer", precision="bf16-true", rows=4, new_tokens=64)


def _seven_billion(name: str, *, records: bool) -> Iterator[Case]:
    lora = Case(architecture=name, method="lora", precision="bf16-true", rows=1, tokens=1024)
    if records:
        yield replace(lora, tokens=256, records=True)
    yield lora
    yield replace(lora, rows=2, tokens=2048, checkpointing=True)
    yield replace(lora, rows=4, tokens=512, chunked_loss=True, packed=True)
    yield replace(lora, rows=4, tokens=4096, checkpointing=True, chunked_loss=True)
    yield replace(lora, rows=4, tokens=2048, checkpointing=True, method="lora_attention")
    yield replace(
        lora,
        checkpointing=True,
        rows=4,
        step_lengths=varying(rows=4, longest=1024),
        num_steps=len(varying(rows=4, longest=1)),
    )
    yield replace(lora, method="qlora", rows=2, tokens=2048, checkpointing=True)
    yield replace(lora, method="full", checkpointing=True, rows=1, tokens=512)
    yield replace(lora, method="none", does="infer", rows=8, tokens=1024, new_tokens=64)


def varying(*, rows: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Return steps of varying shapes, as a run of real rows has them: reserved memory depends on their order."""
    fractions = (0.31, 0.12, 0.55, 0.07, 0.83, 0.21, 0.4, 1.0, 0.62, 0.15, 0.91, 0.28)
    return tuple((max(4, int(fraction * longest)),) * rows for fraction in fractions)
