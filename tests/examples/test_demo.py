"""The demo, without what it takes time for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import demo
from brim.train import create_run_folder
from brim.workflows.prediction import check_output, write_predictions
from stdlib_code.dataset import Row


def stand_in(verb: str, *arguments: str | Path) -> float:
    """What a brim command leaves behind, and what it refuses to write over."""
    given = {str(name): demo.ROOT / value for name, value in zip(arguments[1::2], arguments[2::2], strict=False)}
    if verb == "train":
        (create_run_folder(given["--output-directory"], resume=False).path / "config.yaml").touch()
        return 1.0
    output = given["--rows" if verb == "evaluate" else "--output"]
    check_output(output)
    rows = pd.read_json(given["--dataset"], lines=True)
    write_predictions(rows if verb == "evaluate" else rows.assign(output_response="pass"), output)
    return 1.0


def test_the_demo_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[Row]
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "_brim", stand_in)
    monkeypatch.setattr(demo, "stdlib_modules", list)
    monkeypatch.setattr(demo, "instruction_rows", lambda modules: rows)
    said = []
    for _ in range(2):
        demo.main()
        (tmp_path / "demo-output" / "mine.txt").touch()
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert (tmp_path / "demo-output" / "mine.txt").exists()
