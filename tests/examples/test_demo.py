"""The demo's comparison of two models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import demo
from brim.api.prediction import check_output, write_predictions
from brim.train.run_folder import create_run_folder
from demo import compare, table
from stdlib_code.dataset import Row


def row_figures(*, loss_a_token: float, spread: float) -> pd.DataFrame:
    """200 rows of 10 to 29 tokens; every second token right; rows differ by `spread` in loss a token."""
    num_supervised = 10 + np.arange(200) % 20
    hard = np.where(np.arange(200) % 7 < 3, spread, -spread)
    return pd.DataFrame(
        {
            "row": np.arange(200),
            "loss": (loss_a_token + hard) * num_supervised,
            "num_correct": num_supervised // 2,
            "num_supervised": num_supervised,
        }
    )


def test_figures_are_means_over_tokens() -> None:
    base, tuned = row_figures(loss_a_token=3.0, spread=0.0), row_figures(loss_a_token=2.5, spread=0.0)
    loss, accuracy = compare(base, tuned)
    assert (loss.base, loss.tuned, loss.difference) == pytest.approx((3.0, 2.5, -0.5))
    halves = (base["num_supervised"] // 2).sum() / base["num_supervised"].sum()
    assert (accuracy.base, accuracy.difference) == pytest.approx((halves, 0.0))


def test_the_difference_is_paired() -> None:
    base, tuned = row_figures(loss_a_token=3.0, spread=1.0), row_figures(loss_a_token=2.9, spread=1.0)
    loss, _ = compare(base, tuned)
    assert loss.base_interval.low < loss.tuned < loss.base_interval.high
    assert (loss.difference_interval.low, loss.difference_interval.high) == pytest.approx((-0.1, -0.1))


def test_figures_of_different_rows_are_not_compared() -> None:
    base = row_figures(loss_a_token=3.0, spread=1.0)
    with pytest.raises(AssertionError):
        compare(base, base.assign(row=base["row"] + 1))


def test_the_table_names_every_metric() -> None:
    figures = compare(row_figures(loss_a_token=3.0, spread=0.0), row_figures(loss_a_token=2.5, spread=0.0))
    lines = table(figures).splitlines()
    assert [line[:14].strip() for line in lines[1:4]] == ["loss", "perplexity", "token accuracy"]
    assert lines[1].endswith("-0.5000 (-0.500 to -0.500)")
    assert "20.09" in lines[2]


def stand_in(verb: str, *arguments: str | Path) -> float:
    """What a brim command leaves behind, and what it refuses to write over."""
    given = {str(name): demo.ROOT / value for name, value in zip(arguments[1::2], arguments[2::2], strict=True)}
    if verb == "train":
        (create_run_folder(given["--output-directory"], resume=False).path / "config.yaml").touch()
        return 1.0
    output = given["--rows" if verb == "evaluate" else "--output"]
    check_output(output)
    rows = pd.read_json(given["--dataset"], lines=True)
    figures = row_figures(loss_a_token=3.0, spread=1.0)
    write_predictions(figures if verb == "evaluate" else rows.assign(output_response="pass"), output)
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
