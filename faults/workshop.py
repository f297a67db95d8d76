"""A small project to spoil: a base model of 30,000 weights, data, a configuration, a finished run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Command = Callable[..., Any]

ROWS = [
    {"question": f"add {number % 7} and {number % 11} =", "answer": f" {number % 7 + number % 11}", "split": split}
    for number, split in ((n, 0 if n % 10 < 7 else 1 if n % 10 == 7 else 2) for n in range(20))
]

CONFIG: dict[str, Any] = {
    "model_type": "llm",
    "base_model": "./base",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "prompt": {"template": "Q: {question} A:"},
    "adapter": {"type": "lora", "r": 2, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
    "preprocessing": {"split": {"type": "fixed", "column": "split"}},
    "generation": {"max_new_tokens": 2, "do_sample": False},
    "trainer": {
        "type": "finetune",
        "train_steps": 2,
        "batch_size": 4,
        "effective_batch_size": 8,
        "learning_rate": 0.01,
        "optimizer": {"type": "adam", "betas": [0.9, 0.99]},
        "learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.1},
    },
}
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 1,
}
DATA = "rows.jsonl"


def build(folder: Path, brim: Command) -> None:
    """Write config.yaml, rows.jsonl, base/ and run/ (trained) into a folder."""
    make_base(folder / "base")
    (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "config.yaml").write_text(as_yaml(CONFIG))
    done = brim("train", "config.yaml", "--dataset", DATA, "--output-directory", "run", folder=folder)
    if done.code != 0:
        raise RuntimeError(f"the project cannot be trained: {done.err}")


def as_yaml(config: object) -> str:
    """JSON, which is YAML, with a key a line."""
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


def make_base(folder: Path, **changes: object) -> None:
    """A Llama of random weights with a byte-level tokenizer that knows `<|end|>` and `<|pad|>`.

    changes: of the architecture.
    """
    folder.mkdir(parents=True)
    make_tokenizer(folder, [f"{row['question']}{row['answer']}" for row in ROWS])
    make_llama(folder, **changes)


def make_tokenizer(
    folder: Path, texts: Iterable[str], *, special: Sequence[str] = ("<|end|>", "<|pad|>"), **settings: object
) -> None:
    """A byte-level BPE of 300 tokens at most, learned from the texts; the first special token ends a text.

    settings: of tokenizer_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = dict(zip(("eos_token", "pad_token"), special, strict=False))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **ends, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def make_llama(folder: Path, **changes: object) -> None:
    """Random weights and config.json beside a tokenizer of 300 tokens. changes: of the architecture."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**ARCHITECTURE, **changes})).save_pretrained(folder)
