"""Figures that people know: their settings are configurations of brim's, and what agrees with them."""

import pytest
from benchmarks.memory_known import GIB, KNOWN, agrees, explained, nested
from tests.report.hand_made import hand_made_prediction

from brim.config import load_config
from brim.memory import find_device


def test_there_are_ten_of_several_sources():
    assert len({known.name for known in KNOWN}) == len(KNOWN) == 10
    assert len({known.source for known in KNOWN}) >= 4


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_the_command_is_the_settings(known):
    mapping = nested({"base_model": "base", "trainer.type": "finetune", **known.keys})
    base = {"base_model": "base", "trainer": {"type": "finetune"}}
    if "adapter.type" in known.keys:
        base["adapter"] = "lora"
    by_overrides = load_config(base, overrides=known.overrides).config
    assert by_overrides == load_config(mapping).config
    assert find_device(known.device).name == known.device
    assert f"--device {known.device}" in known.command


def test_a_tenth_is_agreement_and_a_card_is_one_that_has_room():
    measured = next(known for known in KNOWN if known.kind == "allocated")
    near, far = round(1.09 * measured.num_bytes), round(1.11 * measured.num_bytes)
    assert agrees(measured, hand_made_prediction(allocated_bytes=near))
    assert not agrees(measured, hand_made_prediction(allocated_bytes=far))
    card = next(known for known in KNOWN if known.kind == "card")
    assert agrees(card, hand_made_prediction(total_bytes=47 * GIB, fits=True))
    assert not agrees(card, hand_made_prediction(total_bytes=47 * GIB, fits=False))


@pytest.mark.parametrize("known", [known for known in KNOWN if known.why], ids=lambda known: known.name)
def test_another_figure_is_explained_on_the_screen_of_its_settings(known):
    shape = {"batch_size": known.rows, "sequence_length": known.tokens}
    settings = {
        "quantization_bits": known.keys.get("quantization.bits"),
        "gradient_checkpointing": known.keys["trainer.enable_gradient_checkpointing"],
    }
    assert explained(known, hand_made_prediction(**shape, **settings))
    assert not explained(known, hand_made_prediction(batch_size=1, gradient_checkpointing=True))
    agreeing = next(known for known in KNOWN if not known.why)
    assert not explained(agreeing, hand_made_prediction(**shape, **settings))
