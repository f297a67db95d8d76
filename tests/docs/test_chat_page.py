"""docs/chat.md: its configuration and its rows do what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from brim.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """config.yaml and rows.jsonl as on the page, and a base whose tokenizer has ChatML's tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    base = tmp_path / "base"
    base.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").touch()
    (tmp_path / "config.yaml").write_text(block("yaml"))
    (tmp_path / "rows.jsonl").write_text(block("jsonl"))
    monkeypatch.chdir(tmp_path)


def test_the_samples_are_those_of_the_page(project):
    (command,) = re.findall(r"`brim (check .*?)`", PAGE)
    printed = CliRunner().invoke(app, command.split()).output
    samples = printed[printed.index("rows.jsonl:1 ") :].splitlines()
    shown = [re.sub(r" ─+$", "", line) for line in samples if line != "«…»: what the model learns to write"]
    assert shown == block("text").splitlines()


def test_the_keys_it_names_exist():
    from brim.config import all_keys

    keys = {".".join(key.path) for key in all_keys()}
    named = set(re.findall(r"`((?:chat|preprocessing)\.[a-z_]+)", PAGE))
    assert {"chat.supervise", "chat.template", "chat.date", "chat.tools"} <= named
    assert named <= keys
