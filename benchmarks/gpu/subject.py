"""Make what the checks run: models of random weights, drawn on the device, rows of tokens, and cuts of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.cases import Options
from benchmarks.memory_cases import Case as Shape, architecture_of
from brim.batching import MULTIPLE, Costs, Surface
from brim.config import load_config, resolve
from brim.config.schema import Config
from brim.data.tokens import TokenRow, TokenRows, rows_of_step
from brim.models import LLM, device_facts, load_llm
from brim.models.folders import locate
from brim.models.packing import PackedAttention
from brim.workflows.measure.work import random_rows

SEED = 42
LEARNING_RATE = 1e-5
DATA: Mapping[str, tuple[int, float]] = {"alpaca-like": (159, 0.7), "tool chat": (298, 0.8)}  # median, spread of logs
LORA: Mapping[str, Any] = {"type": "lora", "r": 16, "dropout": 0.0, "target_modules": "all-linear"}


def random_llm(
    architecture: Mapping[str, Any], folder: Path, device: torch.device, settings: Mapping[str, Any]
) -> tuple[Config, LLM]:
    """Load a model of this config.json, and of weights that are drawn where they will stay, to be trained.

    folder: an empty one. settings: of brim's configuration. Return it resolved, too.
    """
    settings = {"model_parameters": {"kernels": "torch"}, **settings}  # what is installed decides nothing unasked
    (folder / "config.json").write_text(json.dumps(architecture), encoding="utf-8")
    given = load_config({"base_model": str(folder), "random_seed": SEED, **settings}).config
    located = locate(str(folder), config_only=True)
    config = resolve(given, device_facts(device), context_length=located.context_length).config
    config = config.model_copy(update={"initialize": "random"})
    with device:
        return config, load_llm(config, located, device, trainable=True)


def packing(llm: LLM) -> LLM:
    """Return the same model, for packed rows."""
    return replace(llm, packed=PackedAttention(llm.model, is_cuda=llm.device.type == "cuda"))


def drawn_rows(lengths: Sequence[int], llm: LLM) -> TokenRows:
    """Draw tokens, all of them supervised."""
    vocabulary = int(llm.model.get_input_embeddings().weight.shape[0])
    return random_rows(lengths, vocabulary=vocabulary, supervised=True, seed=SEED)


def in_order(rows: TokenRows, size: int) -> list[TokenRow]:
    """Return the rows as brim's loop takes them, `size` a step."""
    taken: list[TokenRow] = []
    while len(taken) < len(rows):
        taken += rows.take(rows_of_step(num_rows=len(rows), seed=SEED, consumed_samples=len(taken), size=size)[1])
    return taken


def changed(row: TokenRow) -> TokenRow:
    """Return a row that has the tokens of this one in another order."""
    return replace(row, input_ids=np.roll(row.input_ids, 1))


# Of a micro-batch beside what its tokens take, in tokens' worth of time: about what an 8B model has.
_FIXED_TOKENS = 300.0


def token_costs(*, packed: bool) -> Costs:
    """Count tokens for bytes, so that a cap in bytes is one in tokens."""

    def surface(base: float) -> Surface:
        return Surface(base=base, lengths=(1,), tokens=((1, 2),), values=((base + 1, base + 2),))

    return Costs(peak=surface(0.0), static_bytes=0, time=surface(_FIXED_TOKENS), multiple=MULTIPLE if packed else 1)


# What `speed` runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Hold how much of everything there is."""

    effective_rows: int
    num_steps: int  # the first is not timed
    cap_tokens: int  # of a micro-batch
    longest_tokens: int
    saturation: tuple[int, ...]  # tokens of a micro-batch
    prompts: int
    new_tokens: int


SIZES: Mapping[str, Sizes] = {
    name: Sizes(
        effective_rows=64, num_steps=4, cap_tokens=cap, longest_tokens=2048, prompts=64, new_tokens=128,
        saturation=(512, 1024, 2048, 4096, 8192, 16_384),
    )
    for name, cap in (("qwen2-0.5b", 16_384), ("llama-3.1-8b", 4096))
}  # fmt: skip
_TOY = Sizes(
    effective_rows=8, num_steps=2, cap_tokens=128, longest_tokens=60, saturation=(64, 128), prompts=4, new_tokens=3
)


class Subject:
    """Hold a model with an adapter, loaded when it is first asked for, and what ran on it."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.sizes = _TOY if options.small else SIZES[name]
        self.losses: dict[str, list[float]] = {}  # of each step, by the data's name
        self.matrix_flops = 0.0  # a second

    @cached_property
    def loaded(self) -> tuple[Config, LLM]:
        shape = Shape(architecture=self.name, method="lora", precision="bf16-true", rows=1, tokens=1)
        settings = {
            "precision": "bf16-true" if self.options.is_cuda else "fp32",
            "adapter": dict(LORA),
            "trainer": {"type": "finetune", "learning_rate": LEARNING_RATE, "chunked_loss": True},
        }
        with tempfile.TemporaryDirectory() as folder:
            architecture = architecture_of(shape, small=self.options.small)
            return random_llm(architecture, Path(folder), self.options.device, settings)

    @cached_property
    def start(self) -> dict[str, torch.Tensor]:
        """Return the adapter's weights, from which every contender starts."""
        weights = self.loaded[1].model.named_parameters()
        return {name: weight.detach().clone() for name, weight in weights if weight.requires_grad}

    def again(self) -> tuple[Config, LLM]:
        """Return the model as it was in the beginning, and forget the peak of memory."""
        config, llm = self.loaded
        with torch.no_grad():
            for name, weight in llm.model.named_parameters():
                if name in self.start:
                    weight.copy_(self.start[name])
                    weight.grad = None
        if self.options.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.options.device)
        return config, llm

    def lengths(self, data: str) -> list[int]:
        """Return tokens of each row: log-normal, equal for equal names."""
        mid, spread = DATA[data]
        number = self.sizes.effective_rows * self.sizes.num_steps
        scale = 0.1 if self.options.small else 1
        drawn = np.random.default_rng(SEED).lognormal(np.log(mid * scale), spread, number)
        return [int(length) for length in np.clip(drawn, 4, self.sizes.longest_tokens)]
