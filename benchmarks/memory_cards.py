"""Compare `brim memory --compare` with `brim memory --device`: what a card is said to hold, and the bytes needed.

`python -m benchmarks.memory_cards` compares 20 models × 8 cards, with and without bfloat16. Each model is looked at in
one of the five ways, in turn; `--all-ways` looks at all of them. No GPU and no weights are needed. It ends with 1 where
any two answers differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.report import print_table, write_report
from brim import predict_memory
from brim.config import load_config
from brim.memory import Compared, compare_memory

WAYS = ("full", "16-bit", "LoRA", "8-bit + LoRA", "4-bit + LoRA")
CARDS = ("rtx-2080ti", "t4", "v100-16gb", "v100-32gb", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb")


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def _gpt2(wide: int, layers: int, heads: int, vocabulary: int = 50_257) -> dict[str, Any]:
    return {"n_embd": wide, "n_layer": layers, "n_head": heads, "n_positions": 2048, "vocab_size": vocabulary}


# Sizes as the models' own config.json have them.
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"model_type": "llama", **_sizes(4096, 11_008, 32, 32, 32, 32_000), "torch_dtype": "float16"},
    "llama-2-13b": {"model_type": "llama", **_sizes(5120, 13_824, 40, 40, 40, 32_000), "torch_dtype": "float16"},
    "llama-3-8b": {"model_type": "llama", **_sizes(4096, 14_336, 32, 32, 8, 128_256)},
    "llama-3.2-1b": {
        "model_type": "llama",
        **_sizes(2048, 8192, 16, 32, 8, 128_256),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        **_sizes(3072, 8192, 28, 24, 8, 128_256),
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {"model_type": "llama", **_sizes(2048, 5632, 22, 32, 4, 32_000), "torch_dtype": "float32"},
    "mistral-7b": {"model_type": "mistral", **_sizes(4096, 14_336, 32, 32, 8, 32_000), "sliding_window": 4096},
    "mixtral-8x7b": {"model_type": "mixtral", **_sizes(4096, 14_336, 32, 32, 8, 32_000), "num_local_experts": 8},
    "qwen2.5-0.5b": {"model_type": "qwen2", **_sizes(896, 4864, 24, 14, 2, 151_936), "tie_word_embeddings": True},
    "qwen2.5-7b": {"model_type": "qwen2", **_sizes(3584, 18_944, 28, 28, 4, 152_064)},
    "qwen2.5-14b": {"model_type": "qwen2", **_sizes(5120, 13_824, 48, 40, 8, 152_064)},
    "qwen3-4b": {"model_type": "qwen3", **_sizes(2560, 9728, 36, 32, 8, 151_936), "head_dim": 128},
    "qwen3-8b": {"model_type": "qwen3", **_sizes(4096, 12_288, 36, 32, 8, 151_936), "head_dim": 128},
    "gemma-2b": {"model_type": "gemma", **_sizes(2048, 16_384, 18, 8, 1, 256_000), "head_dim": 256},
    "gemma-2-9b": {"model_type": "gemma2", **_sizes(3584, 14_336, 42, 16, 8, 256_000), "head_dim": 256},
    "phi-2": {"model_type": "phi", **_sizes(2560, 10_240, 32, 32, 32, 51_200), "torch_dtype": "float16"},
    "phi-3-mini": {"model_type": "phi3", **_sizes(3072, 8192, 32, 32, 32, 32_064), "pad_token_id": 0},
    "granite-3-2b": {"model_type": "granite", **_sizes(2048, 8192, 40, 32, 8, 49_155)},
    "gpt2-xl": {"model_type": "gpt2", **_gpt2(1600, 48, 25)},
    "starcoderbase-1b": {"model_type": "gpt_bigcode", **_gpt2(2048, 24, 16, 49_152)},
}


# For which PEFT has no choice of its own.
TARGETS = {model: ["q_proj", "v_proj"] for model in ("mixtral-8x7b", "granite-3-2b")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Hold one card's answers for one way to train a model."""

    model: str
    way: str
    card: str
    compared_fits: bool | None  # None: the way is not for this card
    compared_bytes: int | None
    device_fits: bool
    device_bytes: int

    @property
    def is_equal(self) -> bool:
        """The verdicts are; and the bytes, where there is room."""
        if self.compared_fits is None:
            return True
        return self.compared_fits == self.device_fits and (
            not self.device_fits or self.compared_bytes == self.device_bytes
        )


def pairs(model: str, folder: Path, *, way: str | None, cards: Sequence[str] = CARDS) -> Iterator[Pair]:
    """Yield both answers for each card. way: the name of the only one that is looked at; None: all."""
    adapter: dict[str, Any] = {"type": "lora", "target_modules": TARGETS.get(model)}
    config = load_config({"base_model": str(folder), "adapter": adapter, "trainer": {"type": "finetune"}}).config
    for each in compare_memory(config, ways=None if way is None else (way,)):
        assert isinstance(each, Compared), each
        told = {card.name: card for card in each.cards}
        for card in cards:
            of_device = predict_memory(each.variant.config, phase="train", device=card)
            compared = told.get(card)
            yield Pair(
                model=model,
                way=each.variant.name,
                card=card,
                compared_fits=None if compared is None else compared.fits,
                compared_bytes=None if compared is None else compared.total_bytes,
                device_fits=of_device.fits is True,
                device_bytes=of_device.total_bytes,
            )


def write_model(model: str, folder: Path) -> Path:
    """Write the model's config.json into a folder of its own."""
    path = folder / model
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all-ways", action="store_true", help="each model in each of the five ways")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    asked = parser.parse_args()
    found: list[Pair] = []
    begun = process_time()
    with tempfile.TemporaryDirectory() as name:
        for number, model in enumerate(asked.models):
            way = None if asked.all_ways else WAYS[number % len(WAYS)]
            of_model = list(pairs(model, write_model(model, Path(name)), way=way))
            unequal = sum(not pair.is_equal for pair in of_model)
            print(f"{model}: {len(of_model)} compared, {unequal} unequal, {process_time() - begun:.0f} s", flush=True)
            found += of_model
    unequal_pairs = [pair for pair in found if not pair.is_equal]
    print_table(
        "--compare and --device differ",
        ("model", "way", "card", "--compare", "--device"),
        [
            (pair.model, pair.way, pair.card, f"{pair.compared_fits} {pair.compared_bytes}",
             f"{pair.device_fits} {pair.device_bytes}")
            for pair in unequal_pairs
        ],
    )  # fmt: skip
    figures = {
        "num_pairs": len(found),
        "num_unequal": len(unequal_pairs),
        "num_not_for_the_card": sum(pair.compared_fits is None for pair in found),
        "pairs": [asdict(pair) for pair in found],
    }
    print(f"{len(found)} answers, {len(unequal_pairs)} unequal")
    if asked.models == list(MODELS):
        write_report("memory_cards", figures=figures, num_threads=torch.get_num_threads())
    return 1 if unequal_pairs else 0


if __name__ == "__main__":
    sys.exit(main())
