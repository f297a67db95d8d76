"""Make what the inference benchmarks run: a small model that ends its answers itself, and prompts from unseen modules.

The example's base model, fine-tuned here on the example's training rows (docstring and signature to source), since the
base alone hardly ever stops. The prompts come from modules that neither has read, at their real lengths and in an order
of their own.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batching_subject import example
from benchmarks.subject import SEED, from_examples

NUM_ROWS = 500
MAX_NEW_TOKENS = 256
CONTEXT_TOKENS = 1024  # of the base model; a prompt leaves room for all new tokens
_TRAINING_EPOCHS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Hold a folder with `model` and `prompts.jsonl`."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    def settings(self, **generation: Any) -> dict[str, Any]:
        """Return brim's configuration: greedy, fp32, nothing tuned. generation: keys beside or instead of these."""
        return {
            **_task(),
            "base_model": str(self.model),
            "precision": "fp32",
            "random_seed": SEED,
            "trainer": {"type": "none"},
            "generation": {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, **generation},
        }

    def lines(self, num_rows: int | None = None) -> list[str]:
        """Return the first rows, as they stand in the file."""
        return self.prompts.read_text(encoding="utf-8").splitlines(keepends=True)[:num_rows]

    def rows(self, num_rows: int | None = None) -> list[dict[str, str]]:
        """Return the first rows: instruction and input."""
        return [json.loads(line) for line in self.lines(num_rows)]

    def texts(self, num_rows: int | None = None) -> list[str]:
        """Return the first prompts, as the template writes them."""
        return prompt_texts(self.rows(num_rows))

    def pad_id(self) -> int:
        """Return the token that pads rows, which the model has never seen and never writes."""
        return int(json.loads((self.model / "config.json").read_text(encoding="utf-8"))["pad_token_id"])


def prepare_subject(folder: Path, *, num_rows: int = NUM_ROWS) -> Subject:
    """Write the folder; what of it is there already is kept."""
    from_examples()
    from stdlib_code.dataset import TEST, instruction_rows, stdlib_modules

    subject = Subject(folder=folder)
    rows = instruction_rows(stdlib_modules())
    if not subject.model.exists():
        _train(subject, [_fields(row) for row in rows if row.split == 0])
    if not subject.prompts.exists():
        held_out = [_fields(row) for row in rows if row.split == TEST]
        longest = CONTEXT_TOKENS - MAX_NEW_TOKENS
        fitting = [row for row, length in zip(held_out, prompt_lengths(held_out), strict=True) if length <= longest]
        chosen = random.Random(SEED).sample(fitting, num_rows)
        _write(subject.prompts, [{name: row[name] for name in ("instruction", "input")} for row in chosen])
    return subject


def prompt_texts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the prompt of each row."""
    template = _task()["prompt"]["template"]
    return [template.format(**row) for row in rows]


def prompt_lengths(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return tokens of each prompt."""
    from tokenizers import Tokenizer

    from_examples()
    from stdlib_code.pretrain import BASE_MODEL

    tokenizer = Tokenizer.from_file(str(BASE_MODEL / "tokenizer.json"))
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(prompt_texts(rows))]


def quantiles(lengths: Sequence[int]) -> dict[str, float]:
    """Return the quantiles of lengths in tokens, for the record."""
    values = np.asarray(lengths)
    shares = {"least": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "99%": 0.99, "most": 1.0}
    found = {name: float(np.quantile(values, share)) for name, share in shares.items()}
    return {**found, "mean": round(float(values.mean()), 2)}


def _train(subject: Subject, rows: list[dict[str, Any]]) -> None:
    import brim

    _write(subject.folder / "train.jsonl", rows)
    run = subject.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    brim.Model(_training()).train(subject.folder / "train.jsonl", output_directory=run)
    (run / "model").rename(subject.model)


def _training() -> dict[str, Any]:
    from stdlib_code.pretrain import BASE_MODEL

    return {
        **_task(),
        "base_model": str(BASE_MODEL),
        "precision": "fp32",
        "random_seed": SEED,
        "preprocessing": {"split": {"type": "fixed"}, "on_overlong": "drop"},
        "trainer": {
            "type": "finetune",
            "epochs": _TRAINING_EPOCHS,
            "effective_batch_size": 32,
            "learning_rate": 0.001,
            "optimizer": {"type": "adam"},
            "learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.03},
            "skip_all_evaluation": True,
        },
    }


def _task() -> dict[str, Any]:
    return {key: example()[key] for key in ("model_type", "input_features", "output_features", "prompt")}


def _fields(row: Any) -> dict[str, Any]:
    return {"instruction": row.instruction, "input": row.input, "output": row.output, "split": 0}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
