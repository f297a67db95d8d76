"""The base model that the project ships."""

from __future__ import annotations

import json

import pytest

from brim import Model
from stdlib_code import dataset, pretrain

MEBIBYTE = 2**20
FOLDER = pretrain.BASE_MODEL


def test_the_weights_are_safetensors_of_at_most_8_mib() -> None:
    assert [path.name for path in FOLDER.glob("*.safetensors")] == ["model.safetensors"]
    assert (FOLDER / "model.safetensors").stat().st_size <= 8 * MEBIBYTE


def test_the_folder_holds_what_others_read_and_nothing_else() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_architecture_is_that_of_the_script() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert {name: config[name] for name in pretrain.ARCHITECTURE} == pretrain.ARCHITECTURE
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("word", ["pretrain", "hash", "held-out", "Python Software Foundation", "Limits", "license:"])
def test_the_card_says_how_it_came_to_be(word: str) -> None:
    assert word in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_card_leaves_no_place_unfilled_and_names_no_path_of_a_machine() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "{" not in card
    assert "/tmp" not in card
    assert "/home" not in card


def test_it_has_learned_python_that_it_has_not_seen(modules: list[dataset.Module]) -> None:
    held_out = [module for module in modules if module.split == dataset.TEST]
    texts = [next(dataset.pieces(module, max_characters=1600)) for module in held_out][:20]
    config = {**pretrain.TEXT_FEATURES, "base_model": str(FOLDER), "preprocessing": {"global_max_sequence_length": 768}}
    loss = Model(config).evaluate({"prompt": [""] * len(texts), "completion": texts}).metrics["loss"]
    assert 2.0 < loss < 5.0  # guessing: ln 4096 = 8.3; less than 2 would mean that it has read them
