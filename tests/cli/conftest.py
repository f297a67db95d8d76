"""The command line, run in this process: exit code, what it printed, and what it did to the files around it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from brim.cli import main

CONFIG = """\
model_type: llm
base_model: {base}
input_features:
  - name: question
    type: text
output_features:
  - name: answer
    type: text
adapter: lora
preprocessing:
  split: fixed
generation:
  max_new_tokens: 6
  do_sample: false
trainer:
  type: finetune
  epochs: 2
  batch_size: 4
  effective_batch_size: 8
  learning_rate: 0.01
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


Brim = Callable[..., Done]


@pytest.fixture
def brim(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Brim:
    """brim("check", "config.yaml") as the shell would run it, but for the process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["brim", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        assert "Traceback" not in out + err
        return Done(code=code, out=out, err=err)

    return run


@pytest.fixture
def project(tmp_path: Path, sums_file: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: config.yaml and sums.jsonl (28 rows to train on, 4 to validate, 8 to test)."""
    assert sums_file.parent == tmp_path
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tiny_base))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def finished_run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step. Never written to."""
    from brim import Model

    folder = tmp_path_factory.mktemp("finished")
    (folder / "config.yaml").write_text(CONFIG.format(base=tiny_base))
    rows = {"question": ["add 1 and 2 =", "add 2 and 2 ="], "answer": [" 3", " 4"], "split": [0, 1]}
    Model(folder / "config.yaml", overrides=["trainer.train_steps=1"]).train(rows, output_directory=folder / "run")
    return folder / "run"


@pytest.fixture
def digests() -> Callable[..., dict[Path, str]]:
    """digests(folder, …): the SHA-256 of every file below the folders."""

    def of(*folders: Path) -> dict[Path, str]:
        files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    return of
