"""docs/prompting.md: its configuration, its rows and what they become are as the page shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from brim.config import CONTEXT, LABELS, SAMPLE, load_config
from brim.config.schema import PromptConfig, RetrievalConfig
from brim.config.template import TASK
from brim.data.prompts import as_sample

PAGE = (Path(__file__).parents[2] / "docs" / "prompting.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """config.yaml and reviews.jsonl as on the page, and a base of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    base = tmp_path / "base"
    base.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").touch()
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "reviews.jsonl").write_text(blocks("jsonl")[0])
    monkeypatch.chdir(tmp_path)


def test_the_row_reads_as_on_the_page(project):
    from typer.testing import CliRunner

    from brim.cli.app import app

    (command,) = re.findall(r"`brim (check .*?)`", PAGE)
    printed = CliRunner().invoke(app, command.split(" "), env={"COLUMNS": "200"})
    assert printed.exit_code == 0, printed.output
    name, *shown = blocks("text")[0].splitlines()
    assert f"{name} ─" in printed.output
    assert "\n".join(shown) in printed.output


def test_the_other_samples_are_right():
    retrieval = YAML(typ="safe").load(blocks("yaml")[2])["retrieval"]
    assert RetrievalConfig.model_validate(retrieval).num_examples == 3
    assert set(re.findall(r"^\| `\{(__\w+__)\}`", PAGE, re.MULTILINE)) == {SAMPLE, TASK, CONTEXT, LABELS}
    assert as_sample("größe") in PAGE
    assert set(PromptConfig.model_fields) <= set(re.findall(r"`(?:prompt\.)?(\w+)`", PAGE))


def test_the_template_of_several_inputs_is_as_on_the_page():
    config = load_config(YAML(typ="safe", pure=True).load(blocks("yaml")[1])).config
    assert config.prompt.template in blocks("text")
