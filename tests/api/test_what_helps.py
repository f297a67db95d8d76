"""What would make a row fit, against predictions of the changed configurations."""

import pytest
from tests.memory.tiny_architectures import write_folder

import brim
from brim.config import load_config
from brim.memory import what_helps

LONGEST = 48


@pytest.fixture
def folder(tmp_path):
    return write_folder(
        tmp_path / "llama",
        "llama",
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        max_position_embeddings=4096,
    )


def config_of(folder, **given):
    trainer = {"type": "finetune", "effective_batch_size": 8, "optimizer": {"type": "adamw"}}
    trainer |= {key: given.pop(key) for key in tuple(given) if key.startswith(("enable", "chunked"))}
    return load_config({"base_model": str(folder), "trainer": trainer, **given}).config


def test_each_change_is_predicted_and_the_best_comes_first(folder):
    config = config_of(folder, enable_gradient_checkpointing=True, precision="bf16-mixed")
    helps = {each.label: each for each in what_helps(config, longest=LONGEST, device="a100-80gb")}
    assert set(helps) == {
        "an adapter",
        "4-bit weights",
        "8-bit optimizer states",
        "optimizer states beside the GPU",
    }
    assert helps["4-bit weights"].fix == "quantization: {bits: 4}, with adapter: {type: lora}"
    assert list(helps.values()) == sorted(helps.values(), key=lambda each: each.total_bytes)
    adapter = brim.predict_memory(
        {**config.model_dump(exclude_unset=True), "adapter": {"type": "lora"}, "precision": "bf16-true"},
        batch_size=1,
        sequence_length=LONGEST,
        device="a100-80gb",
    )
    assert helps["an adapter"].total_bytes == adapter.total_bytes


def test_what_is_on_or_left_to_a_plan_is_not_advised(folder):
    config = config_of(folder, adapter={"type": "lora"}, quantization={"bits": 4}, chunked_loss=False)
    labels = {each.label for each in what_helps(config, longest=3000, device="a100-80gb")}
    assert labels <= {"loss in chunks", "8-bit optimizer states", "optimizer states beside the GPU"}
    assert "loss in chunks" in labels
