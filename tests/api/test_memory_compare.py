"""`compare_memory`: each card in its own precision, and ways that cannot be beside those that can."""

import json

import pytest
from benchmarks.memory_cards import MODELS, pairs, write_model
from tests.memory.tiny_architectures import write_folder

import brim.memory.traces as memory_traces
from brim import predict_memory
from brim.config import load_config
from brim.errors import InputError
from brim.memory import Compared, Failed, compare_memory, devices, find_device

LORA = {"adapter": "lora", "trainer": {"type": "finetune"}}


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", "llama", num_hidden_layers=6)


def compared(folder, *ways, **keys):
    config = load_config({"base_model": str(folder), **LORA, **keys}).config
    return list(compare_memory(config, sequence_length=16, ways=ways or None))


def test_what_a_card_is_said_to_have_room_for_is_what_it_says_itself(tmp_path):
    """A T4 and a V100 compute Llama-3-8B in fp16-mixed, the others in bf16; some need gradient checkpointing."""
    cards = ("t4", "v100-32gb", "rtx-3070", "h100-80gb")
    found = list(pairs("llama-3-8b", write_model("llama-3-8b", tmp_path), way="4-bit + LoRA", cards=cards))
    assert [pair.card for pair in found if not pair.is_equal] == []
    assert len({pair.device_bytes for pair in found if pair.device_fits}) == 4


def test_a_card_that_has_room_in_bf16_and_none_in_its_own_precision_is_not_named(tmp_path):
    (found,) = pairs("llama-3-8b", write_model("llama-3-8b", tmp_path), way="LoRA", cards=["v100-16gb"])
    assert found.is_equal
    assert not found.device_fits
    assert find_device("v100-16gb").memory_bytes < found.device_bytes


def test_bfloat16_by_name_is_for_cards_that_have_it(llama):
    (way,) = compared(llama, "16-bit")
    assert {card.name for card in way.cards} == {card.name for card in devices() if card.capability >= (8, 0)}
    assert way.fits_on == tuple(card.name for card in way.cards)
    memory = [find_device(name).memory_bytes for name in way.fits_on]
    assert memory == sorted(memory)
    assert way.smallest == way.cards[0]


def test_cards_that_are_alike_share_a_trace(llama, monkeypatch):
    targets = []
    composed = memory_traces._composed

    def count(workload, asked, *others):
        targets.append(asked.device.capability)
        return composed(workload, asked, *others)

    monkeypatch.setattr(memory_traces, "_composed", count)
    (way,) = compared(llama, "LoRA", model_parameters={"attn_implementation": "eager"})
    assert all(card.fits for card in way.cards)
    # The device that is meant with and without checkpointing; one for all cards without bf16.
    assert len(targets) == 3
    assert len({card.total_bytes for card in way.cards}) > 2  # the contexts differ


def test_a_way_that_fails_leaves_the_others(llama, tmp_path):
    base = write_folder(tmp_path / "mixtral", "mixtral", num_hidden_layers=6)
    found = compared(base, "16-bit", "LoRA", adapter={"type": "lora", "target_modules": "all-linear"})
    by_name = {each.variant.name: each for each in found}
    assert isinstance(by_name["16-bit"], Compared)
    failed = by_name["LoRA"]
    assert isinstance(failed, Failed)
    assert "adapter.dropout is 0.05, and experts are among the target modules" in failed.problems[0].what
    assert json.loads(json.dumps(failed.as_dict()))["problems"] == [str(failed.problems[0])]


def test_what_needs_no_trace_is_found_before_the_first(tmp_path, monkeypatch):
    base = write_folder(tmp_path / "mixtral", "mixtral", num_hidden_layers=6)

    def none(*given):
        raise AssertionError("a trace has begun")

    monkeypatch.setattr(memory_traces, "_composed", none)
    config = load_config({"base_model": str(base), **LORA, "adapter": {"type": "lora", "target_modules": "all-linear"}})
    ways = compare_memory(config.config, sequence_length=16)
    assert isinstance(next(ways), Failed)


def test_where_no_way_can_be_the_first_one_s_error_is_raised(llama):
    with pytest.raises(InputError, match="the model's context is 64 tokens"):
        list(compare_memory(load_config({"base_model": str(llama), **LORA}).config, sequence_length=65))


def test_the_models_of_the_benchmark_are_twenty():
    assert len(MODELS) == 20


@pytest.mark.parametrize("device", ["t4", "h100-80gb"])
def test_a_shared_trace_says_what_one_of_its_own_does(tmp_path, device):
    """Heads of 256 go to another kernel on cards that are otherwise alike."""
    folder = write_model("gemma-2b", tmp_path)
    (way,) = compared(folder, "LoRA")
    (card,) = [each for each in way.cards if each.name == device]
    alone = predict_memory(way.variant.config, phase="train", sequence_length=16, device=device)
    assert (card.total_bytes, card.fits) == (alone.total_bytes, alone.fits)
