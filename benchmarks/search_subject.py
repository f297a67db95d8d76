"""Make what the search for a batch size is tried on: random small models, a step of training, a real limit.

The step is the one that brim's loop does: loss over all logits, backward, clipping, AdamW, gradients dropped. All
contenders run the same one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.config import DeviceFacts, load_config, resolve
from brim.config.schema import Config, FinetuneTrainer
from brim.memory.workload import full_batch
from brim.models import load_llm
from brim.models.folders import ModelFolder, locate
from brim.models.loss import NextToken
from brim.train import build_optimizer, clip_gradients

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold a model, the length of its rows, and how much memory there is beside the process that has the model."""

    number: int
    model_type: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    room_bytes: int

    def architecture(self) -> dict[str, Any]:
        """Return the model's config.json."""
        common = {"vocab_size": self.vocabulary, "bos_token_id": None, "eos_token_id": 0}
        if self.model_type == "gpt2":
            return {
                **common,
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": self.hidden,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_positions": 1024,
                **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            }
        return {
            **common,
            "model_type": self.model_type,
            "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]],
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.number % 2 == 0,
        }


def random_case(number: int, seed: str) -> Case:
    """The case of this number; another seed gives other cases."""
    draw = random.Random(f"{seed}/{number}")
    return Case(
        number=number,
        model_type=draw.choice(("llama", "llama", "qwen3", "gpt2")),
        hidden=draw.choice((64, 96, 128, 192)),
        layers=draw.randint(1, 4),
        heads=draw.choice((2, 4)),
        vocabulary=draw.choice((256, 512, 1024, 2048)),
        tokens=draw.randint(16, 112),
        room_bytes=int(MIB * 2 ** draw.uniform(5.0, 6.7)),  # 32 to 104 MiB
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Hold a model that is ready to be trained."""

    config: Config
    folder: ModelFolder
    tokens: int
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], torch.Tensor]  # of a batch of so many rows

    def clip(self) -> None:
        """Bound the gradients."""
        trainer = self.config.trainer
        assert isinstance(trainer, FinetuneTrainer)
        clip_gradients(list(self.model.parameters()), trainer.gradient_clipping)

    def step(self, rows: int) -> None:
        """Forward, backward, update; the gradients are dropped."""
        self.loss(rows).backward()  # type: ignore[no-untyped-call]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def subject(case: Case, base: Path) -> Subject:
    """Build the model of a case. base: an empty folder."""
    (base / "config.json").write_text(json.dumps(case.architecture()), encoding="utf-8")
    config, folder = settled(base)
    model = load_llm(config, folder, torch.device("cpu"), trainable=True).model.train()
    trainer = config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    optimizer = build_optimizer(trainer.optimizer, model.parameters())

    def loss(rows: int) -> torch.Tensor:
        batch = full_batch(rows, case.tokens)
        return NextToken().loss(model, batch) / batch.targets.numel()

    return Subject(config=config, folder=folder, tokens=case.tokens, model=model, optimizer=optimizer, loss=loss)


def settled(base: Path) -> tuple[Config, ModelFolder]:
    """Return the resolved configuration that trains the folder's model from random weights."""
    settings: Mapping[str, Any] = {
        "base_model": str(base),
        "initialize": "random",
        "precision": "fp32",
        "trainer": {
            "type": "finetune",
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "chunked_loss": False,
            "enable_gradient_checkpointing": False,
        },
    }
    folder = locate(str(base), initialize="random", config_only=True)
    facts = DeviceFacts(kind="cpu", bf16=False)
    return resolve(load_config(settings).config, facts, context_length=folder.context_length).config, folder
