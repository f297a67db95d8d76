"""`predict_memory` over several GPUs, and with what is offloaded to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import brim
from brim.errors import InputError
from brim.memory import MemoryPrediction

LAYERS, HIDDEN, VOCABULARY, WIDE = 4, 512, 4096, 2048
LAYER_PARAMETERS = 4 * HIDDEN**2 + 3 * HIDDEN * WIDE + 2 * HIDDEN
PARAMETERS = LAYERS * LAYER_PARAMETERS + 2 * VOCABULARY * HIDDEN + HIDDEN
MIB = 2**20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json and no weights."""
    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=512,
        dtype="float32",
    ).save_pretrained(folder)
    return folder


def predicted(base: Path, **options: Any) -> MemoryPrediction:
    config = {
        "model_type": "llm",
        "base_model": str(base),
        "prompt": {"template": "{question}"},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune", "batch_size": 1},
    }
    return brim.predict_memory(config, batch_size=1, sequence_length=64, device="a100-80gb", **options)


@pytest.fixture(scope="module")
def alone(base: Path) -> MemoryPrediction:
    return predicted(base)


def test_a_rank_ends_a_step_with_its_part_of_weights_and_state(base: Path, alone: MemoryPrediction) -> None:
    rank = predicted(base, world_size=4)

    gone = alone.end_allocated_bytes - rank.end_allocated_bytes
    assert gone == pytest.approx(3 * 4 * PARAMETERS * 3 / 4, rel=0.001)  # blocks are of 512 bytes
    assert rank.world_size == 4
    assert any(choice.startswith("sharding: over 4 GPUs") for choice in rank.choices)
    assert not any(choice.startswith(("sharding", "offload")) for choice in alone.choices)


def test_the_optimizer_on_the_cpu_takes_nothing_on_the_gpu(base: Path, alone: MemoryPrediction) -> None:
    without = predicted(base, offload="optimizer")

    assert without.by_category["optimizer_state"] == 0
    assert alone.end_allocated_bytes - without.end_allocated_bytes == pytest.approx(2 * 4 * PARAMETERS, rel=0.001)
    assert any(choice.startswith("offload: optimizer") for choice in without.choices)


def test_weights_on_the_cpu_are_brought_by_layers(base: Path) -> None:
    without = predicted(base, offload="weights")

    assert without.end_allocated_bytes < 20 * MIB  # cuBLAS' workspaces
    assert 4 * LAYER_PARAMETERS < without.by_category["weights"] < 4 * PARAMETERS
    assert without.by_category["optimizer_state"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"offload": "params"}, "offload is 'params'"), ({"world_size": 0}, "world_size is 0")],
)
def test_what_is_no_choice_is_said(base: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(base, **options)
