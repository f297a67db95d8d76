"""Make the model and the rows of the benchmarks: a small Llama of random weights, docstrings and their code."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from brim.data import prepare
from brim.data.read import read
from brim.data.tokens import TokenRow, TokenRows, rows_of_step

TEMPLATE = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
EFFECTIVE_BATCH_SIZE = 32
SEED = 42

_EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hold the sizes of a Llama with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 2048
    max_position_embeddings: int = 1024


def make_rows(path: Path, *, num_rows: int, max_characters: int) -> Path:
    """Write a JSON Lines file of rows from the standard library's training modules, all of them in the train split.

    max_characters: of instruction, input and output together; longer functions are left out.
    """
    from_examples()
    from stdlib_code.dataset import write_jsonl

    rows = [row for row in training_rows() if len(row.instruction) + len(row.input) + len(row.output) <= max_characters]
    write_jsonl(random.Random(SEED).sample(rows, num_rows), path)
    return path


def make_base(folder: Path, shape: Shape, rows_file: Path) -> Path:
    """Write a model folder: random weights, and a tokenizer that has learned from the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from_examples()
    import stdlib_code.tokenizer as bpe

    texts = [
        TEMPLATE.format(**row) + row["output"] for row in map(json.loads, rows_file.read_text("utf-8").splitlines())
    ]
    tokenizer = bpe.train(texts, vocabulary_size=shape.vocab_size)
    bpe.save(tokenizer, folder, context_length=shape.max_position_embeddings)
    eos, pad = (tokenizer.token_to_id(token) for token in (bpe.END_OF_TEXT, bpe.PADDING))
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **asdict(shape), tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos, pad_token_id=pad
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def configuration(base: Path, *, adapter: dict[str, Any] | None, trainer: dict[str, Any]) -> dict[str, Any]:
    """Return what brim is asked for: one epoch over all rows, fp32, no evaluation."""
    return {
        "model_type": "llm",
        "base_model": str(base),
        "prompt": {"template": TEMPLATE},
        "input_features": [{"name": "instruction", "type": "text"}],
        "output_features": [{"name": "output", "type": "text"}],
        "preprocessing": {"split": {"type": "fixed"}},
        "precision": "fp32",
        "random_seed": SEED,
        "adapter": adapter,
        "trainer": {
            "type": "finetune",
            "epochs": 1,
            "effective_batch_size": EFFECTIVE_BATCH_SIZE,
            "skip_all_evaluation": True,
            **trainer,
        },
    }


def lora(**changes: Any) -> dict[str, Any]:
    """Return an adapter on every linear layer, without dropout, so that a loss does not depend on drawn masks."""
    return {"type": "lora", "r": 8, "dropout": 0.0, "target_modules": "all-linear", **changes}


def rows_in_order(settings: dict[str, Any], rows_file: Path) -> list[TokenRow]:
    """Return the rows of the first epoch as brim's loop takes them, tokenized."""
    from brim.config import load_config
    from brim.session import open_session

    session = open_session(load_config(settings).config)
    prepared = prepare(read(rows_file), session.config, session.encoder, context_length=session.folder.context_length)
    rows: TokenRows = prepared.splits["train"]
    _, order = rows_of_step(num_rows=len(rows), seed=SEED, consumed_samples=0, size=len(rows))
    return list(rows.take(order))


def from_examples() -> None:
    """Let `stdlib_code` be imported: the examples are not installed."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))


@cache
def training_rows() -> list[Any]:
    """Return the rows to learn from; reading the library takes seconds, so it is read once."""
    from_examples()
    from stdlib_code.dataset import TRAIN, instruction_rows, stdlib_modules

    return list(instruction_rows(module for module in stdlib_modules() if module.split == TRAIN))
