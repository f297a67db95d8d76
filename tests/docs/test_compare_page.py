"""docs/compare.md says what is so."""

import re
from pathlib import Path

import pytest
from tests.report.hand_made_runs import two_by_three
from typer.testing import CliRunner

import brim
from brim.cli.app import app
from brim.infer.statistics import t_quantile
from brim.workflows.compare import CompareResult
from brim.workflows.compare.results import ComparedRun

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
NUMBERS = {"two": 2, "three": 3, "five": 5}


def test_the_python_lines_run(monkeypatch):
    runs = [
        ComparedRun(name=name, seed=seed, outcome="finished", figures=run, rows={}, error=None)
        for name, found in two_by_three().items()
        for seed, run in found.items()
    ]
    asked = []

    def compare(files, **options):
        asked.append((files, options))
        files = {"a": "small.yaml", "b": "large.yaml"}
        return CompareResult(
            output_directory=Path(), files=files, digests=files, seeds=(0, 1, 2), changes=(), runs=tuple(runs)
        )

    monkeypatch.setattr("brim.workflows.compare.run.compare", compare)
    (lines,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names = {"brim": brim}
    exec(compile(lines, "compare.md", "exec"), names)  # noqa: S102
    assert asked[0][1] == {"dataset": "train.jsonl", "seeds": 5, "output_directory": "comparison"}
    interval = names["result"].summaries[1].differences["validation"].interval
    assert interval.low < -0.199 < interval.high


def test_the_flags_exist():
    help_text = CliRunner().invoke(app, ["compare", "--help"]).output
    flags = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", PAGE)) - {"--against"}  # of `brim evaluate`
    assert flags == {"--dataset", "--seeds", "--output-directory", "--resume", "--markdown", "--json"}
    assert all(flag in help_text for flag in flags)


def test_the_quantiles_are_those_of_the_distribution():
    told = re.findall(r"(\d+\.\d+) for\s+(two|three|five)", PAGE)
    assert [number for _, number in told] == ["two", "three", "five"]
    for quantile, number in told:
        decimals = len(quantile.partition(".")[2])
        assert t_quantile(NUMBERS[number] - 1) == pytest.approx(float(quantile), abs=0.5 * 10**-decimals)
