"""docs/embeddings.md: its commands and its Python do what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import brim
from brim.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
ROWS = {"question": ["add 1 and 2 =", "add 3 ="], "answer": [" 3", " 3"]}


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_base):
    monkeypatch.chdir(tmp_path)
    config = {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "none"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    rows = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_commands(project):
    commands = re.findall(r"^brim (embed .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        arguments = command.replace("RUN_OR_CONFIG", "config.yaml").replace("--layer 12", "--layer 1").split()
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    for name in ("embeddings", "unit", "tokens"):
        assert pq.read_table(f"{name}.parquet").column_names == ["row", "embedding"]


def test_the_python(project):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    known = {"model": brim.Model("config.yaml"), "rows": ROWS}
    exec(code, known)  # noqa: S102
    assert known["found"].by_layer["last"].shape == (2, 32)
    assert known["found"].rows.tolist() == [0, 1]
    assert known["by_token"].by_layer["layers.0.mlp"][0].shape == (known["by_token"].num_tokens[0], 32)
    assert pq.read_table("vectors.parquet").column_names == ["row", "last", "0"]
