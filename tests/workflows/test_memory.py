"""`brim.predict_memory` and the comparison of ways and cards: what they take, choose, share and refuse."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from benchmarks.memory_cards import pairs, write_model
from tests.memory.tiny_architectures import write_folder
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim import optimizer
from transformers import LlamaForCausalLM, masking_utils

import brim
import brim.memory.traces as memory_traces
from brim.config import load_config
from brim.config.schema import FinetuneTrainer
from brim.errors import InputError, ModelError
from brim.memory import Compared, Failed, ask, compare_memory, what_helps
from brim.memory.devices import devices, find_device
from brim.memory.events import CATEGORIES
from brim.memory.variants import variants

SHAPE = {"batch_size": 2, "sequence_length": 8, "device": "a100-80gb"}
LORA = {"adapter": "lora", "trainer": {"type": "finetune"}}
KEPT = {"type": "finetune", "enable_gradient_checkpointing": False}  # no question, which would take two predictions


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama's config.json and nothing else; its context is 64 tokens."""
    return write_folder(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=2)


@pytest.fixture
def unsettled(base):
    return {"base_model": str(base), "adapter": {"type": "lora"}, "trainer": {"type": "finetune"}}


@pytest.fixture
def trained(unsettled):
    return {**unsettled, "trainer": KEPT}


@pytest.fixture
def untrained(base):
    return {"base_model": str(base), "trainer": {"type": "none"}, "generation": {"max_new_tokens": 3}}


def test_config_json_is_enough_and_all_phases_are_predicted(base, trained, untrained):
    assert [file.name for file in base.iterdir()] == ["config.json"]
    peaks = {}
    for phase in ("load", "train", "evaluate", "generate"):
        prediction = brim.predict_memory(trained if phase == "train" else untrained, phase=phase, **SHAPE)
        assert (prediction.phase, prediction.device, prediction.world_size) == (phase, "a100-80gb", 1)
        assert sum(prediction.by_category.values()) == prediction.allocated_bytes
        assert len(prediction.step_peaks_bytes) == (2 if phase == "train" else 0)
        assert prediction.allocated_bytes <= prediction.reserved_bytes
        assert prediction.total_bytes == prediction.reserved_bytes + prediction.outside_bytes
        assert prediction.fits is True
        assert prediction.budget_bytes > 79 * 2**30
        peaks[phase] = prediction.allocated_bytes
    assert peaks["load"] <= peaks["evaluate"] <= peaks["train"]


def test_a_frozen_base_lies_once_under_mixed_precision(tmp_path):
    """On a card without bf16 a bf16 base was there twice: as it is stored, and in autocast's copies."""
    folder = write_folder(tmp_path, "llama", num_hidden_layers=6, dtype="bfloat16", tie_word_embeddings=False)
    config = {"base_model": str(folder), "adapter": {"type": "lora", "r": 1}, "trainer": KEPT}
    found = {name: brim.predict_memory(config, **{**SHAPE, "device": name}) for name in ("t4", "a100-80gb")}
    for name, precision in (("t4", "fp16-mixed"), ("a100-80gb", "bf16")):
        assert any(choice.startswith(f"precision: {precision}") for choice in found[name].choices)
    assert found["t4"].by_category["weights"] < 1.1 * found["a100-80gb"].by_category["weights"]


def test_the_answer_is_for_the_run_that_a_plan_would_choose(unsettled):
    """Gradient checkpointing where it does not fit without, and the margin of a plan counts."""
    shape = {"batch_size": 512, "sequence_length": 64}
    roomy = brim.predict_memory(unsettled, **shape, memory_bytes=80 * 2**30)
    assert (roomy.gradient_checkpointing, roomy.other.gradient_checkpointing) == (False, True)
    assert roomy.other.total_bytes < roomy.total_bytes
    said = [choice.partition(" (")[0] for choice in roomy.choices if choice.startswith("gradient checkpointing")]
    assert said == ["gradient checkpointing: off"]
    tight = brim.predict_memory(unsettled, **shape, memory_bytes=roomy.total_bytes + 2**20)
    assert tight.gradient_checkpointing
    assert tight.other.fits
    assert tight.allocated_bytes == roomy.other.allocated_bytes
    without_margin = {**unsettled, "memory": {"margin": "0MiB"}}
    assert not brim.predict_memory(without_margin, **shape, memory_bytes=tight.budget_bytes).gradient_checkpointing


def test_without_a_device_the_answer_is_for_the_run_where_memory_is_short(unsettled, monkeypatch):
    """No card is known, so none can be said to have room for the faster way."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = {"batch_size": 512, "sequence_length": 64}
    found = brim.predict_memory(unsettled, **shape)
    assert (found.gradient_checkpointing, found.other.gradient_checkpointing) == (True, False)
    assert (found.budget_bytes, found.fits) == (None, None)
    assert found.reason.startswith("it needs ")
    assert found.total_bytes < found.other.total_bytes
    assert found.allocated_bytes == brim.predict_memory(unsettled, **shape, device="a100-80gb").other.allocated_bytes
    assert "no device is named; without it, which is faster and chosen where it fits" in found.choices[-1]
    # Where all weights are trained their update is the peak, whatever the backward pass takes.
    found = brim.predict_memory({**unsettled, "adapter": None}, batch_size=1, sequence_length=2)
    assert (found.gradient_checkpointing, found.other.gradient_checkpointing) == (False, True)
    assert found.other.total_bytes >= found.total_bytes
    assert found.choices[-1].startswith("gradient checkpointing: off ")
    assert found.choices[-1].endswith("are needed, which is not less)")


def test_where_checkpointing_is_no_question_there_is_no_other_prediction(unsettled, monkeypatch):
    def settled(config=unsettled, **asked):
        found = brim.predict_memory(config, **asked, **SHAPE)
        assert found.other is None
        return found.gradient_checkpointing

    assert [settled(phase=phase) for phase in ("load", "evaluate", "generate")] == [None] * 3
    for is_on in (True, False):
        trainer = {**unsettled["trainer"], "enable_gradient_checkpointing": is_on}
        assert settled({**unsettled, "trainer": trainer}) is is_on
    found = brim.predict_memory({**unsettled, "quantization": {"bits": 4}}, **SHAPE)
    assert (found.quantization_bits, found.as_dict()["quantization_bits"]) == (4, 4)
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    assert settled() is False
    choices = brim.predict_memory(unsettled, **SHAPE).choices
    assert "gradient checkpointing: off (this architecture has none)" in choices


def test_code_of_its_own_is_passed_over_where_transformers_has_the_class(tmp_path):
    """As in Phi-3's config.json. The code is there, and would say that it ran."""
    folder = write_folder(tmp_path, "phi3", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text("raise SystemExit('this code must not run')\n")
    plain = write_folder(tmp_path / "plain", "phi3")
    config = {"adapter": {"type": "lora", "target_modules": "all-linear"}, "trainer": KEPT}
    found, expected = (brim.predict_memory({**config, "base_model": str(each)}, **SHAPE) for each in (folder, plain))
    assert found.total_bytes == expected.total_bytes
    (told,) = [choice for choice in found.choices if choice.startswith("base_model")]
    assert told.startswith("base_model: transformers' own phi3 (auto_map in config.json names code of its own")
    assert not [choice for choice in expected.choices if "auto_map" in choice]


def test_a_mapping_a_file_and_a_configuration_are_the_same_and_say_the_phase(trained, untrained, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(trained))
    expected = brim.predict_memory(trained, **SHAPE).as_dict()
    for config in (file, str(file), load_config(trained).config):
        assert brim.predict_memory(config, **SHAPE).as_dict() == expected
    overridden = load_config(file, overrides=["adapter.r=64"]).config
    assert brim.predict_memory(overridden, **SHAPE).end_allocated_bytes > expected["end_allocated_bytes"]
    assert (expected["phase"], brim.predict_memory(untrained, **SHAPE).phase) == ("train", "generate")


def test_the_dictionary_is_json_and_categories_are_the_timeline(unsettled):
    prediction = brim.predict_memory(unsettled, **SHAPE)
    told = json.loads(json.dumps(prediction.as_dict()))
    assert told == prediction.as_dict()
    assert set(told["by_category"]) == set(CATEGORIES)
    timeline, allocated = prediction.timeline, prediction.timeline.allocated_bytes()
    assert (allocated.max(), allocated[-1]) == (prediction.allocated_bytes, prediction.end_allocated_bytes)
    assert timeline.reserved_bytes.max() == prediction.reserved_bytes
    assert (timeline.reserved_bytes >= allocated).all()
    assert all((each >= 0).all() for each in timeline.live_bytes.values())
    assert [label for _, label in timeline.marks][-1] == "end"


def test_shapes_are_those_of_the_configuration_unless_given(trained, tmp_path):
    def predicted(**given):
        return brim.predict_memory(given.pop("config", config), device="a100-80gb", **given)

    config = {**trained, "trainer": {**KEPT, "batch_size": 3, "eval_batch_size": 5}}
    prediction = predicted()
    assert (prediction.batch_size, prediction.sequence_length) == (3, 64)
    assert "batch size: 3 (trainer.batch_size)" in prediction.choices
    assert "sequence length: 64 (the model's context)" in prediction.choices
    cut = {**config, "generation": {"max_new_tokens": 4}, "preprocessing": {"global_max_sequence_length": 16}}
    assert [predicted(config=cut, phase=phase).batch_size for phase in ("evaluate", "generate")] == [5, 5]
    prediction = predicted(config=cut, batch_size=1)
    assert "sequence length: 16 (preprocessing.global_max_sequence_length)" in prediction.choices
    assert not any(choice.startswith("batch size") for choice in prediction.choices)
    long = write_folder(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=10**6)
    prediction = predicted(config={**trained, "base_model": str(long)}, batch_size=1)
    assert prediction.sequence_length == 2048  # a long context is not taken for the rows
    assert any("set sequence_length to that of the longest" in choice for choice in prediction.choices)


def test_what_a_plan_decides_is_shown_at_its_least_and_said_with_the_verb_that_shows_it(unsettled, untrained):
    by_length = {**unsettled, "trainer": {"type": "finetune", "effective_batch_size": 8}}
    prediction = brim.predict_memory(by_length, device="a100-80gb")
    assert prediction.batch_size == 1
    least = "batch size: 1 (trainer.batch_size: auto, the smallest micro-batch; `brim plan` shows the micro-batches of a run)"
    assert least in prediction.choices
    others = brim.predict_memory(untrained, device="a100-80gb").choices
    assert any("`brim predict --plan` shows how many rows go together" in choice for choice in others)
    off = "gradient checkpointing: off (trainer.enable_gradient_checkpointing: auto; it fits without)"
    assert off in prediction.choices
    fixed = {"type": "finetune", "batch_size": 1, "effective_batch_size": 8, "enable_gradient_checkpointing": False}
    the_same = brim.predict_memory({**unsettled, "trainer": fixed}, device="a100-80gb")
    assert the_same.reserved_bytes == prediction.reserved_bytes  # two micro-batches of a step, both times
    assert off not in the_same.choices


def test_lowered_weights_are_not_kept_where_nothing_is_trained(base):
    mixed = {"base_model": str(base), "trainer": {"type": "finetune"}, "precision": "bf16-mixed"}
    beyond = {}
    for phase in ("evaluate", "generate"):
        config = {**mixed, "generation": {"max_new_tokens": 3}}
        weights = brim.predict_memory(config, phase=phase, **SHAPE).timeline.live_bytes["weights"]
        beyond[phase] = int(weights.max() - weights[-1])
    found = json.loads((base / "config.json").read_text())
    wide, inner = found["hidden_size"], found["intermediate_size"]
    keys = wide // found["num_attention_heads"] * found["num_key_value_heads"]
    matrices = 2 * [wide * wide, keys * wide, keys * wide, wide * wide, inner * wide, inner * wide, wide * inner]
    lowered = [-(-2 * elements // 512) * 512 for elements in (*matrices, found["vocab_size"] * wide)]
    assert beyond == {"evaluate": max(lowered), "generate": max(lowered)}


def test_any_memory_will_do_and_what_lies_outside_pytorch_counts(trained):
    def of(memory_bytes):
        return brim.predict_memory(trained, memory_bytes=memory_bytes, batch_size=2, sequence_length=8)

    little, ample = of(2**20), of(2**30)
    assert (little.fits, little.budget_bytes) == (False, 2**20)
    assert "too little" in little.reason
    exact, short = of(ample.total_bytes), of(ample.outside_bytes + ample.allocated_bytes - 1)
    assert (ample.fits, exact.total_bytes, exact.fits) == (True, ample.total_bytes, True)
    assert short.fits is False
    assert short.reserved_bytes < short.budget_bytes


def test_allocator_settings_are_taken_from_the_environment_and_from_the_call(trained, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    plain = brim.predict_memory(trained, **SHAPE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:2")
    rounded = brim.predict_memory(trained, **SHAPE)
    assert plain.allocated_bytes < rounded.allocated_bytes
    assert brim.predict_memory(trained, allocator="roundup_power2_divisions:2", **SHAPE).as_dict() == rounded.as_dict()
    assert brim.predict_memory(trained, allocator="", **SHAPE).as_dict() == plain.as_dict()
    with pytest.raises(InputError, match="expandable_segment"):
        brim.predict_memory(trained, allocator="expandable_segmants:True", **SHAPE)


def test_bad_arguments(trained):
    for given, message in (
        ({"batch_size": 0}, "batch_size is 0\n  expected: a whole number from 1 to 1,048,576"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"sequence_length": 1}, "sequence_length is 1\n  expected: a whole number from 2 to 1,073,741,824"),
        ({"batch_size": 10**40}, "batch_size is a number of too many digits"),
        ({"world_size": 2**40}, "world_size is 1099511627776\n  expected: a whole number from 1 to 65,536"),
        ({"device": None, "memory_bytes": 2**60}, "memory_bytes is"),
        ({"device": None, "memory_bytes": 0}, "memory_bytes is 0"),
        ({"world_size": False}, "world_size is False"),
        ({"offload": "disk"}, "offload is 'disk'"),
        ({"phase": "trane"}, "phase is 'trane'\n  expected: one of load, train, evaluate, generate"),
    ):
        with pytest.raises(InputError) as raised:
            brim.predict_memory(trained, **{**SHAPE, **given})
        assert message in str(raised.value), given


def test_prompts_and_new_tokens_share_the_context(untrained):
    with pytest.raises(InputError, match="is 8, and 60 new tokens follow, but the model's context is 64"):
        brim.predict_memory({**untrained, "generation": {"max_new_tokens": 60}}, **SHAPE)
    for changes, told in (
        ({}, "sequence length: 61 (the model's context less generation.max_new_tokens, 3)"),
        ({"preprocessing": {"global_max_sequence_length": 64}}, "sequence length: 61 (the model's context less"),
        ({"preprocessing": {"global_max_sequence_length": 61}}, "sequence length: 61 (preprocessing.global_max"),
        ({"generation": {"max_new_tokens": 62}}, "sequence length: 2 (the model's context less"),
    ):
        prediction = brim.predict_memory({**untrained, **changes}, device="a100-80gb")
        assert any(choice.startswith(told) for choice in prediction.choices)


def test_folders_that_cannot_be_traced(tmp_path, trained):
    """What else a config.json may not say stands in tests/models/test_folder.py."""
    for content, message in (
        ('{"model_type": "t5"}', "'t5'"),
        ('{"model_type": "llama", "head_dim": 0, "num_hidden_layers": 1}', "cannot be traced: ZeroDivisionError"),
        ('{"model_type": "llama", "vocab_size": 64, "pad_token_id": 64}', "cannot be traced: AssertionError"),
        ('{"model_type": "llama", "use_return_dict": false}', "config.json is damaged"),
        ('{"model_type": "llama", "vocab_size": 33554432}', "vocab_size in config.json is 33554432"),
        ('{"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}', "its own code"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError) as raised:
            brim.predict_memory({**trained, "base_model": str(tmp_path)}, **SHAPE)
        assert message in str(raised.value), content


def test_predictions_in_threads_do_not_disturb_each_other(trained, untrained):
    asked = [(trained, "train"), (untrained, "generate"), (trained, "load"), (untrained, "evaluate")]
    expected = [brim.predict_memory(config, phase=phase, **SHAPE).as_dict() for config, phase in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(brim.predict_memory, config, phase=phase, **SHAPE) for config, phase in asked]
        found = [future.result().as_dict() for future in futures]
    assert found == expected


def test_an_assertion_of_brims_own_is_not_blamed_on_the_architecture(trained, monkeypatch):
    from brim.memory.trace import recording

    monkeypatch.setattr(recording, "_train", recording._run)  # which asserts that there is something to run
    with pytest.raises(AssertionError):
        brim.predict_memory(trained, **SHAPE)


def test_the_process_is_as_it_was_after_a_prediction_and_after_one_that_failed(trained, monkeypatch):
    """Hooks and the collector, too: see tests/memory/test_recording.py."""

    def state():
        patched = (optimizer._foreach_supported_types, FakeTensor.item, masking_utils.sdpa_mask)
        return torch.get_rng_state().tolist(), torch.is_grad_enabled(), patched, dict(os.environ)

    torch.manual_seed(7)
    before = state()
    monkeypatch.setattr("brim.models.loss.NextToken.loss", _draw_and_fail)
    with pytest.raises(ModelError, match="in the midst"):
        brim.predict_memory(trained, **SHAPE)
    monkeypatch.undo()
    assert state() == before
    brim.predict_memory(trained, **SHAPE)
    assert state() == before


def _draw_and_fail(*given, **named):
    with unset_fake_temporarily():
        torch.rand(3)
    raise RuntimeError("in the midst")


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", "llama", num_hidden_layers=6)


def compared(folder, *ways, **keys):
    config = load_config({"base_model": str(folder), **LORA, **keys}).config
    return list(compare_memory(config, sequence_length=16, ways=ways or None))


def test_what_a_card_is_said_to_have_room_for_is_what_it_says_itself(tmp_path):
    """A T4 and a V100 compute in fp16-mixed, the others in bf16; some need gradient checkpointing.

    Gemma-2B's heads of 256 go to another kernel on cards that are otherwise alike.
    """
    cards = ("t4", "v100-32gb", "rtx-3070", "h100-80gb")
    found = list(pairs("gemma-2b", write_model("gemma-2b", tmp_path), way="4-bit + LoRA", cards=cards))
    assert [pair.card for pair in found if not pair.is_equal] == []
    assert len({pair.device_bytes for pair in found if pair.device_fits}) == 4
    llama = write_model("llama-3-8b", tmp_path)
    (found,) = pairs("llama-3-8b", llama, way="LoRA", cards=["v100-16gb"])  # which has room in bf16 alone
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


def test_a_way_that_fails_leaves_the_others_and_is_found_before_the_first_trace(tmp_path, monkeypatch):
    base = write_folder(tmp_path / "mixtral", "mixtral", num_hidden_layers=6)
    keys = {"adapter": {"type": "lora", "target_modules": "all-linear"}}
    by_name = {each.variant.name: each for each in compared(base, "16-bit", "LoRA", **keys)}
    assert isinstance(by_name["16-bit"], Compared)
    failed = by_name["LoRA"]
    assert isinstance(failed, Failed)
    assert "adapter.dropout is 0.05, and experts are among the target modules" in failed.problems[0].what
    assert json.loads(json.dumps(failed.as_dict()))["problems"] == [str(failed.problems[0])]

    def none(*given):
        raise AssertionError("a trace has begun")

    monkeypatch.setattr(memory_traces, "_composed", none)
    config = load_config({"base_model": str(base), **LORA, **keys}).config
    assert isinstance(next(compare_memory(config, sequence_length=16)), Failed)
    with pytest.raises(InputError, match="the model's context is 64 tokens"):  # where no way can be
        list(compare_memory(config, sequence_length=65))


def ways(**keys):
    return {each.name: each for each in variants(load_config({"base_model": "base", **keys}).config)}


def test_five_ways_to_train_and_what_each_changes():
    found = ways(trainer={"type": "finetune"}, adapter={"type": "lora", "r": 16})
    assert {name: dict(each.changes) for name, each in found.items()} == {
        "full": {"adapter": "null"},
        "16-bit": {"precision": "bf16-true", "adapter": "null"},
        "LoRA": {},
        "8-bit + LoRA": {"quantization": "{bits: 8}"},
        "4-bit + LoRA": {"quantization": "{bits: 4}"},
    }
    assert found["4-bit + LoRA"].config.adapter.r == 16
    trainer = {"type": "finetune", "optimizer": "sgd", "batch_size": 3, "enable_gradient_checkpointing": True}
    for way in ways(trainer=trainer, preprocessing={"global_max_sequence_length": 77}).values():  # others are kept
        kept = way.config.trainer
        assert (kept.optimizer.type, kept.batch_size, kept.enable_gradient_checkpointing) == ("sgd", 3, True)
        assert way.config.preprocessing.global_max_sequence_length == 77


def test_what_a_configuration_says_that_a_way_cannot_is_changed_and_no_more():
    own = {"bits": 4, "bnb_4bit_use_double_quant": False}
    found = ways(trainer={"type": "finetune"}, adapter="lora", quantization=own)
    assert not found["4-bit + LoRA"].config.quantization.bnb_4bit_use_double_quant
    assert (found["4-bit + LoRA"].changes, found["LoRA"].changes) == ({}, {"quantization": "null"})
    way = ways(trainer={"type": "none", "batch_size": 5})["LoRA"]
    assert isinstance(way.config.trainer, FinetuneTrainer)
    assert (way.config.trainer.batch_size, way.config.trainer.optimizer.type) == (5, "adamw")
    assert way.changes["trainer"] == "{type: finetune, optimizer: adamw}"
    way = ways(trainer={"type": "finetune"}, adapter={"type": "lora", "bias_type": "all"})["LoRA"]
    assert (way.config.adapter.bias_type, way.changes["adapter"]) == ("none", "{type: lora, r: 8}")
    assert ways(trainer={"type": "finetune"}, initialize="random")["LoRA"].config.initialize == "pretrained"


def asked(base, *, longest, trainer=None, **keys):
    """The changes that would help, by their labels."""
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 4096}
    folder = write_folder(base, "llama", num_hidden_layers=2, **sizes)
    trainer = {"type": "finetune", "effective_batch_size": 8, "optimizer": {"type": "adamw"}, **(trainer or {})}
    config = load_config({"base_model": str(folder), "trainer": trainer, **keys}).config
    return config, {each.label: each for each in what_helps(config, longest=longest, device="a100-80gb")}


def test_each_change_that_helps_is_predicted_and_the_best_comes_first(tmp_path):
    checkpointing = {"enable_gradient_checkpointing": True}
    config, helps = asked(tmp_path, longest=48, trainer=checkpointing, precision="bf16-mixed")
    states = {"8-bit optimizer states", "optimizer states beside the GPU"}
    assert set(helps) == {"an adapter", "4-bit weights", *states}
    assert helps["4-bit weights"].fix == "quantization: {bits: 4}, with adapter: {type: lora}"
    assert list(helps.values()) == sorted(helps.values(), key=lambda each: each.total_bytes)
    lora = {**config.model_dump(exclude_unset=True), "adapter": {"type": "lora"}, "precision": "bf16-true"}
    adapter = brim.predict_memory(lora, batch_size=1, sequence_length=48, device="a100-80gb")
    assert helps["an adapter"].total_bytes == adapter.total_bytes


def test_what_is_on_or_left_to_a_plan_is_not_advised(tmp_path):
    keys = {"adapter": {"type": "lora"}, "quantization": {"bits": 4}, "trainer": {"chunked_loss": False}}
    _, helps = asked(tmp_path, longest=3000, **keys)
    assert "loss in chunks" in helps
    assert set(helps) <= {"loss in chunks", "8-bit optimizer states", "optimizer states beside the GPU"}


def test_kernels_that_are_asked_for_leave_out_the_cards_that_have_none(llama):
    (way,) = compared(llama, "LoRA", model_parameters={"kernels": "liger"})
    assert isinstance(way, Compared)
    assert {card.name for card in way.cards} == {card.name for card in devices() if card.has_bf16}


def test_what_only_runs_is_predicted_with_its_own_operators_whatever_kernels_it_trains_by(trained):
    given = {**trained, "model_parameters": {"kernels": "liger"}}
    for phase, kernels in (("load", "liger"), ("train", "liger"), ("evaluate", "torch"), ("generate", "torch")):
        found = ask(given, phase=phase, device="a100-80gb", memory_bytes=None)
        assert found.config.model_parameters.kernels == kernels
