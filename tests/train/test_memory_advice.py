"""What is advised where memory is too small: nothing that is done already."""

import pytest

from brim.train.update import for_a_row, for_an_update

SHORTER = "train anew with shorter rows (preprocessing.global_max_sequence_length)"
CHECKPOINTING = "set trainer.enable_gradient_checkpointing: true, also with --resume"
FOUR_BITS = "with a base in 4 bits and an adapter (quantization.bits: 4)"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, f"{CHECKPOINTING}, {SHORTER}, or {FOUR_BITS}"),
        ({"trainer": {"enable_gradient_checkpointing": True}}, f"{SHORTER}, or {FOUR_BITS}"),
        ({"trainer": {"enable_gradient_checkpointing": True}, "quantization": {"bits": 4}}, SHORTER),
    ],
)
def test_for_a_row(settings, advice):
    assert for_a_row(settings) == advice


@pytest.mark.parametrize(
    ("optimizer", "adapter", "advice"),
    [
        (
            "adamw",
            None,
            "train anew with states in 8 bits (trainer.optimizer.type: adamw_8bit), states that move to the host when "
            "a GPU is full (paged_adamw_8bit), or an adapter (adapter.type: lora)",
        ),
        (
            "paged_adamw",
            {"type": "lora"},
            "train anew with states in 8 bits (trainer.optimizer.type: adamw_8bit)",
        ),
        ("paged_adamw_8bit", {"type": "lora"}, "train anew with a smaller adapter (adapter.r)"),
    ],
)
def test_for_an_update(optimizer, adapter, advice):
    assert for_an_update({"trainer": {"optimizer": {"type": optimizer}}, "adapter": adapter}) == advice
