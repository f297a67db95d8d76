"""What the tests of the command line share: a project, a finished run, digests of files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.gallery import Gallery

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


@pytest.fixture
def project(tmp_path: Path, sums_file: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: config.yaml and sums.jsonl (28 rows to train on, 4 to validate, 8 to test)."""
    assert sums_file.parent == tmp_path
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tiny_base))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def untrained(project: Path) -> Path:
    """The project, whose configuration takes the base model as it is."""
    text = (project / "config.yaml").read_text().replace("adapter: lora\n", "")
    (project / "config.yaml").write_text(text[: text.index("trainer:")] + "trainer:\n  type: none\n")
    return project


@pytest.fixture
def finished_run(gallery: Gallery) -> Path:
    """A run of eight steps. Never written to."""
    return gallery("lora").run


@pytest.fixture
def run(project: Path, finished_run: Path) -> Path:
    """A finished run in the current folder that may be written to."""
    return shutil.copytree(finished_run, project / "run")


@pytest.fixture
def digests() -> Callable[..., dict[Path, str]]:
    """digests(folder, …): the SHA-256 of every file below the folders."""

    def of(*folders: Path) -> dict[Path, str]:
        files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    return of


def records(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Iterable[object]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
