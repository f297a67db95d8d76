"""The README says what is so."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from brim.cli.app import app
from brim.config import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_yaml_is_that_of_the_demo():
    assert blocks("yaml") == [(ROOT / "examples/stdlib_code/config.yaml").read_text(encoding="utf-8")]
    load_config(ROOT / "examples/stdlib_code/config.yaml")


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test", "bench-loss", "bench-loop"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_mistakes_are_told_as_shown(tmp_path, monkeypatch):
    shown = re.search(r"^  \$ brim check config.yaml\n(.*?)^  ```", README, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        "base_model: model\n"
        "input_features: [{name: instruction, type: text}]\n"
        "output_features: [{name: output, type: text}]\n"
        "adapter: {type: lora, rank: 16}\n"
        "trainer:\n  type: finetune\n  learning_rat: 0.0001\n  batch_size: 5\n  effective_batch_size: 32\n"
        "hyperopt: {goal: minimize}\n"
    )
    result = CliRunner().invoke(app, ["check", "config.yaml"])
    told = [f"  {line}" for line in f"brim: {result.exception}".splitlines()]
    assert told == shown.group(1).splitlines()


@pytest.mark.parametrize("verb", ["memory", "check", "train", "evaluate", "predict", "schema"])
def test_the_verbs_and_their_flags_exist(verb):
    said = " ".join(re.findall(rf"^brim {verb}.*$", README, flags=re.MULTILINE))
    assert said
    help_text = CliRunner().invoke(app, [verb, "--help"]).output
    for flag in re.findall(r"--[a-z-]+", said):
        assert flag in help_text


def test_the_python_session_uses_names_that_exist():
    import brim

    (session,) = blocks("python")
    compile(session, "README.md", "exec")
    for name in re.findall(r"model\.([a-z]+)\(", session):
        assert callable(getattr(brim.Model, name))


def test_every_page_it_names_is_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
