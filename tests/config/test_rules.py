"""Values that are fine alone and contradict each other, section by section."""

import datetime

from tests.config.conftest import CPU
from tests.messages import refused, says

from brim.config import load_config, resolve
from brim.config.schema import ChatConfig, Config, QuantizationConfig
from brim.config.text import dump
from brim.errors import ConfigError

CONTRADICTIONS = [  # keys of the root
    {"prompt": {"template": "{question} {answer}"}},
    {"prompt": {"template": "{x.y}"}},
    {"input_features": [{"name": "answer", "type": "text"}]},
    {"input_features": [{"name": "prompt", "type": "text", "column": "answer"}]},
    {"preprocessing": {"sample_size": 3, "sample_ratio": 0.5}},
    {"preprocessing": {"split": {"type": "random", "probabilities": [0.7, 0.1, 0.1]}}},
    {"preprocessing": {"split": {"type": "random", "probabilities": [0.0, 0.5, 0.5]}}, "trainer": {"type": "finetune"}},
    {"generation": {"temperature": 0.0}},
    {"generation": {"min_new_tokens": 9, "max_new_tokens": 8}},
    {"precision": "bf16-true", "adapter": {"type": "lora", "bias_type": "all"}},
    {"adapter": "lora", "initialize": "random"},
    {"quantization": {"bits": 4}, "initialize": "random", "trainer": {"type": "finetune"}},
    {"quantization": {"bits": 8}, "adapter": {"type": "lora", "bias_type": "all"}},
    {"quantization": {"bits": 4}, "adapter": {"type": "lora"}, "generation": {"merge_adapter": True}},
    {"adapter": {"type": "lora", "target_modules": "(a+)+$"}},
    {"trainer": {"optimizer": {"type": "adam"}}},
    {"preprocessing": {"split": {"type": "random", "column": "id"}}},
    {"output_features": [{"name": "answer", "type": "text", "preprocessing": {"fallback_label": "x"}}]},
    {"output_features": [{"name": "answer", "type": "text", "decoder": {"type": "category_extractor"}}]},
    {"chat": {}, "prompt": {"template": "{q}"}},
    {"chat": {}, "prompt": {"task": "x", "retrieval": {"type": "random"}}},
    {"chat": "messages"},
]
IN_THE_TRAINER = [
    {"steps_per_checkpoint": 10, "checkpoints_per_epoch": 2},
    {"early_stop": 0},
    {"early_stop": -2},
    {"validation_field": "prompt"},
    {"optimizer": {"type": "sgd", "nesterov": True}},
    {"batch_size": 3, "effective_batch_size": 32},
    {"effective_batch_size": 64, "max_batch_size": 32},
    {"batch_size": "auto", "gradient_accumulation_steps": 4},
    {"batch_size": 2, "use_maximum_batch_size": True},
    {"gradient_accumulation_steps": 2, "effective_batch_size": 8, "use_maximum_batch_size": True},
    # Each is told once.
    {"batch_size": 0, "effective_batch_size": 32, "validation_field": "x", "validation_metric": "y"},
    {"type": "none", "batch_rampup": "1ep"},
]
IN_THE_SCHEDULE = [
    {"decay": "cosine", "eta_min": 0.01},
    {"warmup_length": "5ba", "warmup_fraction": 0.1},
    {"decay": "wsd", "decay_length": "5ba", "decay_fraction": 0.2},
    {"decay": "cosine", "decay_length": "5ba"},
    {"warmup_length": "5"},
    {"decay": "wsd", "warmup_fraction": 0.6, "decay_fraction": 0.5},
    {"decay": "wsd", "warmup_length": "0.6dur", "decay_length": "0.5dur"},
    {"decay": "wsd", "warmup_fraction": 0.6, "decay_length": "0.5dur"},
]


def test_contradictions(minimal, finetune, refusals):
    refusals("contradictions.txt", lambda keys: load_config(minimal(**keys)), CONTRADICTIONS)
    refusals("contradictions_in_the_trainer.txt", lambda keys: load_config(finetune(**keys)), IN_THE_TRAINER)
    schedules = [{"learning_rate_scheduler": keys} for keys in IN_THE_SCHEDULE]
    refusals("contradictions_in_the_schedule.txt", lambda keys: load_config(finetune(**keys)), schedules)


NO_CONTRADICTIONS = [
    {"prompt": {"template": "{question}"}, "input_features": [{"name": "p", "type": "text", "column": "answer"}]},
    {"preprocessing": {"sample_size": 3, "sample_ratio": 1.0}}, {"chat": None}, {"generation": {"temperature": 0.0, "do_sample": False}},
    {"preprocessing": {"split": {"type": "random", "probabilities": [1.0, 0, 0]}}},
    {"preprocessing": {"split": {"type": "random", "probabilities": [0.0, 0.5, 0.5]}}},  # nothing is trained
    {"trainer": {"type": "finetune", "validation_field": "combined", "early_stop": -1}},
    {"trainer": {"type": "finetune", "validation_field": "answer", "validation_metric": "token_accuracy"}},
    {"trainer": {"type": "finetune", "optimizer": {"type": "sgd", "nesterov": True, "momentum": 0.9}}},
]  # fmt: skip
NO_OVERLAPS = [
    {"warmup_length": "5ba"}, {"warmup_length": "1ep", "warmup_fraction": 0.0}, {"decay": "wsd", "decay_length": "100tok"},
    {"decay": "wsd", "warmup_length": "0.6dur", "decay_length": "0.4dur"},
    {"decay": "wsd", "warmup_fraction": 0.7, "decay_fraction": 0.3},  # 0.7 + 0.3 in binary is 1
    {"decay": "wsd", "warmup_fraction": 0.9, "decay_fraction": 0.1},
    {"decay": "wsd", "warmup_length": "1ep", "decay_length": "100sp"},  # compared once the run's length is known
]  # fmt: skip


def test_what_looks_like_a_contradiction_and_is_none(minimal, finetune):
    for keys in NO_CONTRADICTIONS:
        load_config(minimal(**keys))
    for keys in NO_OVERLAPS:
        config = load_config(finetune(learning_rate_scheduler=keys)).config
        assert load_config(config.model_dump(mode="json", exclude={"trainer": {"batch_size"}})).config == config


def test_a_cut_by_length_may_be_spelled_out_and_a_search_without_a_choice_is_told(finetune):
    keys = {"batch_size": "auto", "gradient_accumulation_steps": "auto", "use_maximum_batch_size": True, "epochs": 1}
    assert load_config(finetune(effective_batch_size=32, **keys)).notes == load_config(finetune(**keys)).notes == ()
    searched = {"batch_search": "halving", "effective_batch_size": 32, "epochs": 1}
    assert load_config(finetune(**searched)).notes == ()
    (note,) = load_config(finetune(**searched, batch_size=4)).notes
    assert says(note, "trainer.batch_search: … no effect, trainer.batch_size decides")


NO_BUDGETS = [
    14, "14", 1.5, 15_000_000_000, "90%", "0.9", -1, "-2 GiB", 0, "0 GiB", 10**30, "9" * 400 + " GiB",
    "2000000 TiB", "auot", "much", True, None, [],
]  # fmt: skip


def test_a_budget_and_a_margin_of_memory(minimal, refusals):
    budgets, margins = ["auto", "14 GiB", "14GiB", "500 MiB", 0.9, 1, 1.0, "1 B"], ["auto", "1.5 GiB", "0 B", 0, 0.05]
    for key, values in [("budget", budgets), ("margin", margins)]:
        for value in values:
            assert getattr(load_config(minimal(memory={key: value})).config.memory, key) == value
    refusals("budgets.txt", lambda value: load_config(minimal(memory={"budget": value})), NO_BUDGETS)
    with refused("memory.margin: … is 1 … below 1 such as 0.05 … nothing would be left; set 0.05"):
        load_config(minimal(memory={"margin": 1}))


def test_keys_of_other_bits_are_noted(minimal):
    def noted(**keys):
        notes = load_config(minimal(quantization=keys)).notes
        return [note.split(":")[0].removeprefix("quantization.") for note in notes if "no effect with bits" in note]

    assert noted(bits=4, llm_int8_threshold=5.0) == ["llm_int8_threshold"]
    others = noted(bits=8, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype="float16")
    assert others == ["bnb_4bit_compute_dtype", "bnb_4bit_quant_type"]
    assert noted(bits=8, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True) == []  # spelled out


def test_what_comes_quantised_is_held_to_the_same_rules(minimal):
    """The base model's folder can bring quantization that the configuration does not name."""
    config = load_config(minimal(adapter={"type": "lora", "bias_type": "all"})).config
    quantised = config.model_copy(update={"quantization": QuantizationConfig(bits=8)})
    with refused("adapter.bias_type: … trains biases, which bitsandbytes' layers cannot do", by=ConfigError):
        resolve(quantised, CPU)
    in_16_bits = config.model_copy(update={"precision": "bf16-true"})  # with trained weights come biases, too
    with refused("… bias_type all trains biases, and precision bf16-true has them in 16 bits", by=ConfigError):
        resolve(in_16_bits, CPU)


def chat(value, **keys):
    return {"base_model": "model", "chat": value, **keys}


def test_conversations_come_back_from_their_file_are_off_by_default_and_an_override_turns_them_on(tmp_path):
    for value in ({}, {"supervise": "last", "tools": "t", "template": "/a/b.jinja", "date": "2026-01-31"}):
        config = resolve(load_config(chat(value)).config, CPU).config
        assert "features" not in dump(config, tmp_path / "config.yaml")
        loaded = load_config(tmp_path / "config.yaml")
        assert (loaded.config, loaded.notes) == (config, ())
        assert loaded.config.chat == ChatConfig.model_validate(value)
        assert Config.model_validate(config.model_dump(exclude_unset=True)) == config
    assert load_config({"base_model": "model"}).config.chat is None
    assert load_config({"base_model": "model"}, ["chat={}"]).config.chat == ChatConfig()
    assert load_config({"base_model": "model"}, ["chat.supervise=last"]).config.chat == ChatConfig(supervise="last")
    assert load_config(chat({})).config.answer_name == "assistant"
    assert load_config(chat(None)).config.answer_name == "completion"
    load_config(chat({}, prompt={"template": None}))


def test_a_day_is_a_date_with_or_without_quotes(file):
    for text in ("2026-01-31", "'2026-01-31'"):
        assert load_config(file(f"base_model: m\nchat: {{date: {text}}}\n")).config.chat.date == "2026-01-31"
    assert ChatConfig(date=datetime.date(2026, 1, 31)).date == "2026-01-31"
    for day in ("2026-02-30", "31.01.2026", "20260131", "today"):
        with refused(f"chat.date: chat.date is '{day}' … a day such as 2026-01-31, or null"):
            load_config(chat({"date": day}))
