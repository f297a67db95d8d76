"""What is expanded from a few recorded layers is what all layers do: every event, its size, category and place."""

import pytest
from tests.memory.expansion import events, recorded_layers, stream_of
from tests.memory.tiny_architectures import FAMILIES, UNTRACEABLE, write_folder

from brim import predict_memory
from brim.errors import ModelError

LORA = {"adapter": {"type": "lora", "r": 4}}
DORA = {"adapter": {"type": "lora", "r": 4, "use_dora": True, "target_modules": "all-linear"}}
DROPPED = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}}

TRAINING = {
    "full": {},
    "full, checkpointed, accumulated": {"enable_gradient_checkpointing": True, "effective_batch_size": 8},
    "full, bf16-true, sgd with momentum": {"precision": "bf16-true", "optimizer": {"type": "sgd", "momentum": 0.9}},
    "full, fp16-mixed, adafactor": {"precision": "fp16-mixed", "optimizer": {"type": "adafactor"}},
    "full, fp32, adamw_8bit": {"precision": "fp32", "optimizer": {"type": "adamw_8bit"}},
    "full, paged": {"optimizer": {"type": "paged_adamw_8bit"}, "enable_gradient_checkpointing": True},
    "full, whole logits": {"chunked_loss": False},
    "lora, chunked loss": {"chunked_loss": True, "enable_gradient_checkpointing": True, **LORA},
    "lora, dropout, whole logits, fp32, accumulated": {
        "precision": "fp32",
        "chunked_loss": False,
        "effective_batch_size": 8,
        **DROPPED,
    },
    "dora": {"enable_gradient_checkpointing": True, **DORA},
    "4-bit": {"quantization": {"bits": 4}, "enable_gradient_checkpointing": True, **LORA},
    "4-bit, fp32, without checkpoints": {"quantization": {"bits": 4}, "precision": "fp32", **LORA},
    "8-bit, fp16, accumulated": {
        "quantization": {"bits": 8},
        "precision": "fp16-mixed",
        "effective_batch_size": 8,
        **LORA,
    },
    "8-bit dora": {"quantization": {"bits": 8}, "enable_gradient_checkpointing": True, **DORA},
    "eager": {"attention": "eager", **LORA},
    "flash": {"attention": "flash_attention_2", "enable_gradient_checkpointing": True},
}


def training(folder, settings):
    """A configuration from the keys of TRAINING, of which most are the trainer's."""
    above = {key: settings[key] for key in ("adapter", "quantization", "precision") if key in settings}
    if "attention" in settings:
        above["model_parameters"] = {"attn_implementation": settings["attention"]}
    trainer = {key: value for key, value in settings.items() if key not in {*above, "attention"}}
    return {
        "base_model": str(folder),
        "trainer": {"type": "finetune", "batch_size": 2, "effective_batch_size": 2, **trainer},
        **above,
    }


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", "llama", num_hidden_layers=6)


@pytest.mark.parametrize("settings", TRAINING.values(), ids=TRAINING)
def test_training(llama, settings):
    config = training(llama, settings)
    with recorded_layers() as layers:
        expanded = stream_of(config, "train")
    assert layers == [4]
    assert events(expanded) == events(stream_of(config, "train", whole=True))


def test_evaluation(llama):
    config = {"base_model": str(llama), "trainer": {"type": "none"}}
    assert events(stream_of(config, "evaluate")) == events(stream_of(config, "evaluate", whole=True))


def generation(folder, **settings):
    return {"base_model": str(folder), "trainer": {"type": "none"}, "generation": {"max_new_tokens": 6, **settings}}


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}],
    ids=["greedy", "sampled"],
)
def test_generation(llama, settings):
    config = generation(llama, **settings)
    with recorded_layers() as layers:
        expanded = stream_of(config, "generate")
    assert layers == [4, 4]
    assert events(expanded) == events(stream_of(config, "generate", whole=True))


def test_beams_reorder_the_cache_outside_the_layers_so_all_are_recorded(llama):
    with recorded_layers() as layers:
        stream = stream_of(generation(llama, do_sample=False, num_beams=3, max_new_tokens=3), "generate")
    assert layers == [4, 6]
    reordered = [
        stream.categories[storage]
        for storage, place in zip(stream.storages, stream.places, strict=True)
        if storage >= 0 and place.operator == "aten::index_select"
    ]
    assert reordered == ["kv_cache"] * 2 * 2 * 6  # keys and values of six layers, after the first and the second token


# Of the patterns in which layers differ one architecture each, with the number of layers that is recorded.
PATTERNS = {
    "gpt2": ({"n_layer": 5}, 4),
    "mixtral": ({"num_hidden_layers": 5}, 4),
    "deepseek_v3": ({"num_hidden_layers": 7}, 6),  # two dense layers, then such with experts
    "gpt_oss": ({"num_hidden_layers": 9}, 7),  # sliding and full attention by turns
    "gemma2": ({"num_hidden_layers": 9}, 7),
}


@pytest.mark.parametrize("family", PATTERNS)
def test_training_where_layers_differ(family, tmp_path):
    changes, num_recorded = PATTERNS[family]
    settings = {"enable_gradient_checkpointing": True, "chunked_loss": True, "optimizer": "sgd"}
    config = training(write_folder(tmp_path / family, family, **changes), settings)
    with recorded_layers() as layers:
        expanded = stream_of(config, "train", tokens=4)
    assert layers == [num_recorded]
    assert events(expanded) == events(stream_of(config, "train", tokens=4, whole=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_can_be_traced(family, tmp_path):
    folder = write_folder(tmp_path / family, family)
    stream = stream_of({"base_model": str(folder), "trainer": {"type": "none"}}, "evaluate", tokens=4)
    assert "weights" in stream.categories
    assert "logits_and_loss" in stream.categories


def test_what_asks_for_values_is_refused_by_name(tmp_path):
    folder = write_folder(tmp_path / "dbrx", "dbrx", **UNTRACEABLE["dbrx"])
    config = {"base_model": str(folder), "trainer": {"type": "none"}}
    with pytest.raises(
        ModelError, match=r"the architecture 'dbrx' cannot be traced: DynamicOutputShapeException: aten.nonzero"
    ):
        predict_memory(config, batch_size=1, sequence_length=4, phase="evaluate", device="t4")
