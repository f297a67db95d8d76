"""Make what the batching benchmarks train: docstrings to code at their real lengths, a model and a first adapter."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.subject import EFFECTIVE_BATCH_SIZE, SEED, from_examples

Method = Literal["lora", "full"]

CONTEXT_TOKENS = 1536  # nothing is cut; of 5,334 training rows (Python 3.11), 20 are longer and are left out
HELD_OUT_ROWS = 64

# Of the size of Llama 3.2 1B, to fill a GPU: 32 rows of 1,536 tokens take about 80 GiB.
GPU_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_768,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Hold a folder with `base`, `adapter`, `rows.jsonl` and `held_out.jsonl`."""

    folder: Path
    device: Literal["cpu", "cuda"]

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def adapter(self) -> Path:
        """Return the adapter that every contender starts from."""
        return self.folder / "adapter"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.jsonl"

    def settings(
        self, *, method: Method = "lora", trainer: dict[str, Any] | None = None, memory: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the example's configuration for one epoch over all rows, uncut, at `effective_batch_size: 32`.

        Without warm-up, which brim and its peers count differently, and without evaluation.
        """
        shipped = example()
        adapter = {**shipped["adapter"], "pretrained_adapter_weights": str(self.adapter)}
        settings = {
            **{key: shipped[key] for key in ("model_type", "input_features", "output_features", "prompt")},
            "base_model": str(self.base),
            "adapter": adapter if method == "lora" else None,
            "precision": "bf16-mixed" if self.device == "cuda" else "fp32",
            "random_seed": SEED,
            "preprocessing": {"split": {"type": "fixed"}},
            "trainer": {
                "type": "finetune",
                "epochs": 1,
                "effective_batch_size": EFFECTIVE_BATCH_SIZE,
                "learning_rate": shipped["trainer"]["learning_rate"] if method == "lora" else 0.0003,
                "optimizer": shipped["trainer"]["optimizer"],
                "learning_rate_scheduler": {"decay": "cosine"},
                "skip_all_evaluation": True,
                **(trainer or {}),
            },
        }
        return settings if memory is None else {**settings, "memory": memory}

    def lengths(self) -> NDArray[np.int64]:
        """Return tokens of each row, in the order of the file."""
        with self.rows.open(encoding="utf-8") as file:
            return token_lengths([json.loads(line) for line in file])


def prepare_subject(folder: Path, *, num_rows: int, device: Literal["cpu", "cuda"]) -> Subject:
    """Write the folder. On a GPU the model is larger, with random weights; the tokenizer is the example's."""
    from_examples()
    from stdlib_code.dataset import TRAIN, VALIDATION, instruction_rows, stdlib_modules

    subject = Subject(folder=folder, device=device)
    every = instruction_rows(stdlib_modules())
    for split, path, count in ((TRAIN, subject.rows, num_rows), (VALIDATION, subject.held_out, HELD_OUT_ROWS)):
        rows = [
            {"instruction": row.instruction, "input": row.input, "output": row.output, "split": 0}
            for row in every
            if row.split == split
        ]
        fitting = [row for row, length in zip(rows, token_lengths(rows), strict=True) if length <= CONTEXT_TOKENS]
        _write(path, random.Random(SEED).sample(fitting, count))
    _make_base(subject)
    _make_adapter(subject)
    return subject


def token_lengths(rows: list[dict[str, Any]]) -> NDArray[np.int64]:
    """Return tokens of each row, as the example's template writes it, with the token that ends it."""
    from tokenizers import Tokenizer

    from_examples()
    from stdlib_code.pretrain import BASE_MODEL

    template = example()["prompt"]["template"]
    tokenizer = Tokenizer.from_file(str(BASE_MODEL / "tokenizer.json"))
    encodings = tokenizer.encode_batch([template.format(**row) + row["output"] for row in rows])
    return np.array([len(encoding.ids) + 1 for encoding in encodings], dtype=np.int64)


def example() -> dict[str, Any]:
    """Return the configuration that comes with the example."""
    from ruamel.yaml import YAML

    path = Path(__file__).parents[1] / "examples" / "stdlib_code" / "config.yaml"
    settings: dict[str, Any] = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    return settings


def _make_base(subject: Subject) -> None:
    """Write the example's base model with longer rows allowed; on a GPU its tokenizer with other, larger weights."""
    from_examples()
    from stdlib_code.pretrain import BASE_MODEL

    shutil.copytree(BASE_MODEL, subject.base)
    for name, changes in (
        ("config.json", {"max_position_embeddings": CONTEXT_TOKENS}),
        ("tokenizer_config.json", {"model_max_length": CONTEXT_TOKENS}),
    ):
        content = json.loads((subject.base / name).read_text(encoding="utf-8"))
        (subject.base / name).write_text(json.dumps({**content, **changes}, indent=1), encoding="utf-8")
    if subject.device == "cuda":
        _random_weights(subject.base)


def _random_weights(base: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig.from_pretrained(base, **GPU_SHAPE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)


def _make_adapter(subject: Subject) -> None:
    from brim.config import load_config
    from brim.models import load_llm
    from brim.session import open_session

    settings = subject.settings()
    del settings["adapter"]["pretrained_adapter_weights"]
    session = open_session(load_config(settings).config)
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    llm.model.save_pretrained(str(subject.adapter))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
