"""The base model that the project ships, its tokenizer, and the demo without what it takes time for."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, strategies as st

import demo
from brim import Model
from brim.train import RunFolder
from brim.workflows.prediction import check_output, write_predictions
from stdlib_code import dataset, pretrain, tokenizer
from stdlib_code.dataset import Module

FOLDER = pretrain.BASE_MODEL
TEXTS = [f"def f{n}(self):\n    for x in y:\n        return self.x[{n}]\n\n\n" for n in range(50)]
LEARNED = tokenizer.train(TEXTS, vocabulary_size=300)


def test_the_folder_holds_what_others_read_in_at_most_8_mib_and_nothing_else() -> None:
    as_json = {
        f"{name}.json"
        for name in ("config", "generation_config", "special_tokens_map", "tokenizer", "tokenizer_config")
    }
    assert {path.name for path in FOLDER.iterdir()} == {"README.md", "model.safetensors", *as_json}
    assert (FOLDER / "model.safetensors").stat().st_size <= 8 * 2**20
    config = json.loads((FOLDER / "config.json").read_text())
    assert {name: config[name] for name in pretrain.ARCHITECTURE} == pretrain.ARCHITECTURE
    assert config["dtype"] == "bfloat16"
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("pretrain", "hash", "held-out", "Python Software Foundation", "Limits", "license:"):
        assert word in card
    for trace in ("{", "/tmp", "/home"):  # nothing that was not filled in, and no path of a machine
        assert trace not in card


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> list[Module]:
    """Eight modules that the base model has not read. Reading all of the library takes seconds."""
    folder = tmp_path_factory.mktemp("library")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in [file for file in files if dataset.split_of(file.stem) == dataset.TEST][:8]:
        shutil.copy(file, folder)
    return dataset.stdlib_modules(folder)


@pytest.mark.run
def test_it_has_learned_python_that_it_has_not_seen(held_out: list[Module]) -> None:
    texts = [next(dataset.pieces(module, max_characters=1600)) for module in held_out]
    config = {**pretrain.TEXT_FEATURES, "base_model": str(FOLDER), "preprocessing": {"global_max_sequence_length": 768}}
    loss = Model(config).evaluate({"prompt": [""] * len(texts), "completion": texts}).metrics["loss"]
    assert 2.0 < loss < 5.0  # guessing: ln 4096 = 8.3; less than 2 would mean that it has read them


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert LEARNED.decode(LEARNED.encode(text).ids, skip_special_tokens=False) == text


def stand_in(verb: str, *arguments: str | Path) -> float:
    """What a brim command leaves behind, and what it refuses to write over."""
    given = {str(name): demo.ROOT / value for name, value in zip(arguments[1::2], arguments[2::2], strict=False)}
    if verb == "train":
        (RunFolder.create(given["--output-directory"], resume=False).path / "config.yaml").touch()
        return 1.0
    output = given["--rows" if verb == "evaluate" else "--output"]
    check_output(output)
    rows = pd.read_json(given["--dataset"], lines=True)
    write_predictions(rows if verb == "evaluate" else rows.assign(output_response="pass"), output)
    return 1.0


def test_the_demo_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held_out: list[Module]
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "_brim", stand_in)
    monkeypatch.setattr(demo, "stdlib_modules", lambda: held_out)
    said = []
    for _ in range(2):
        demo.main()
        (tmp_path / "demo-output" / "mine.txt").touch()
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert (tmp_path / "demo-output" / "mine.txt").exists()
