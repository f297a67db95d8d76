"""The ways to train one model: what each changes, and what it leaves."""

from brim.config import load_config
from brim.config.schema import FinetuneTrainer
from brim.memory.variants import variants


def ways(**keys):
    return {each.name: each for each in variants(load_config({"base_model": "base", **keys}).config)}


def test_five_ways_and_what_each_changes():
    found = ways(trainer={"type": "finetune"}, adapter={"type": "lora", "r": 16})
    assert {name: dict(each.changes) for name, each in found.items()} == {
        "full": {"adapter": "null"},
        "16-bit": {"precision": "bf16-true", "adapter": "null"},
        "LoRA": {},
        "8-bit + LoRA": {"quantization": "{bits: 8}"},
        "4-bit + LoRA": {"quantization": "{bits: 4}"},
    }
    assert found["4-bit + LoRA"].config.adapter.r == 16


def test_other_settings_are_kept():
    trainer = {"type": "finetune", "optimizer": "sgd", "batch_size": 3, "enable_gradient_checkpointing": True}
    for way in ways(trainer=trainer, preprocessing={"global_max_sequence_length": 77}).values():
        assert way.config.trainer.optimizer.type == "sgd"
        assert way.config.trainer.batch_size == 3
        assert way.config.trainer.enable_gradient_checkpointing
        assert way.config.preprocessing.global_max_sequence_length == 77


def test_a_quantization_of_the_user_s_is_kept_where_it_has_the_bits():
    own = {"bits": 4, "bnb_4bit_use_double_quant": False}
    found = ways(trainer={"type": "finetune"}, adapter="lora", quantization=own)
    assert not found["4-bit + LoRA"].config.quantization.bnb_4bit_use_double_quant
    assert found["4-bit + LoRA"].changes == {}
    assert found["LoRA"].changes == {"quantization": "null"}


def test_what_does_not_train_is_taken_to_train():
    way = ways(trainer={"type": "none", "batch_size": 5})["LoRA"]
    assert isinstance(way.config.trainer, FinetuneTrainer)
    assert (way.config.trainer.batch_size, way.config.trainer.optimizer.type) == (5, "adamw")
    assert way.changes["trainer"] == "{type: finetune, optimizer: adamw}"


def test_biases_do_not_train_beside_16_bits():
    found = ways(trainer={"type": "finetune"}, adapter={"type": "lora", "bias_type": "all"})
    assert found["LoRA"].config.adapter.bias_type == "none"
    assert found["LoRA"].changes["adapter"] == "{type: lora, r: 8}"


def test_random_weights_become_pretrained_ones():
    assert ways(trainer={"type": "finetune"}, initialize="random")["LoRA"].config.initialize == "pretrained"
