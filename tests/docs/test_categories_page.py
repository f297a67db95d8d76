"""docs/categories.md: its configurations load, and texts stand for the labels that it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from brim.config import MAX_STEPS, LabelReader, load_config, template_with_task
from brim.config.template import characters_within
from brim.data import with_labels_of_data
from brim.data.labels import MOST_LABELS
from brim.data.read import read

PAGE = (Path(__file__).parents[2] / "docs" / "categories.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", PAGE, flags=re.MULTILINE)


@pytest.fixture
def first():
    return load_config(YAML(typ="safe", pure=True).load(BLOCKS[0])).config.output_features[0]


@pytest.mark.parametrize(("text", "label", "why"), ROWS)
def test_the_table_of_texts(first, text, label, why):
    reading = LabelReader(first).read(text)
    assert (reading.label, reading.is_fallback) == (label, "fallback" in why)


def test_the_constrained_configuration_is_one(first):
    constrained = load_config({"base_model": "base", **YAML(typ="safe", pure=True).load(BLOCKS[2])}).config
    feature = constrained.output_features[0]
    assert feature.categories is not None
    assert feature.categories.constrain_to_vocabulary
    assert feature.labels == first.labels


def test_the_labels_of_the_data():
    source = read({"review": ["x", "y", "z"], "sentiment": ["positive", "negative", "positive"]})
    config = load_config(YAML(typ="safe", pure=True).load(BLOCKS[1])).config
    config, _ = with_labels_of_data(config, source)
    assert config.output_features[0].labels == ("negative", "positive")
    assert config.output_features[0].fallback_label == "positive"
    assert template_with_task(config) == "Is this review negative, positive? {review}\n"
    assert f"{MOST_LABELS:,} labels" in PAGE


def test_the_figures():
    assert f"{MAX_STEPS:,}\nsteps" in PAGE
    assert f"{characters_within(r'.*x', MAX_STEPS):,} with one such repeat" in PAGE
    assert f"{characters_within(r'.*x.*', MAX_STEPS):,} with two" in PAGE


def test_every_row_of_the_table_is_looked_at():
    assert len(ROWS) == 4
