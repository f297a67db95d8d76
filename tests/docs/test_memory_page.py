"""docs/memory.md: its commands exist and its categories are those of the table."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from brim.cli.app import app
from brim.config import load_config
from brim.memory.variants import variants
from brim.report import LOOKS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def commands():
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^brim memory .*$", PAGE, flags=re.MULTILINE)]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_command_is_understood(command, tmp_path, monkeypatch):
    """Its flags go together: what is missing is the base model alone."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("base_model: ./no-such-folder\nadapter: lora\ntrainer: {type: finetune}\n")
    result = CliRunner().invoke(app, command)
    assert "base_model: no such folder" in str(result.exception)


def test_there_are_commands():
    assert len(commands()) == 20


def test_the_known_figures_are_those_of_the_benchmark():
    from benchmarks.memory_known import KNOWN

    table = PAGE.split("### Figures that people know")[1].split("## Limits")[0]
    written = json.loads((RESULTS / "memory_known.json").read_text(encoding="utf-8"))["figures"]
    assert [figure["name"] for figure in written] == [known.name for known in KNOWN]
    for known, figure in zip(KNOWN, written, strict=True):
        assert (figure["command"], figure["why"]) == (known.command, known.why)
        assert known.command in table
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {known.name} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert (cells[2], cells[3].split()[0]) == (
            f"{known.num_bytes / 2**30:.1f}",
            f"{figure['brim_bytes'] / 2**30:.1f}",
        )
        assert figure["agrees"] or known.why


def test_the_lines_of_the_table_are_those_that_are_printed():
    table = PAGE.split("## What the table says")[1].split("\n\n")[1]
    named = re.findall(r"^\| ([^|]+?) \|", table, flags=re.MULTILINE)[2:]
    assert named == [look.label for look in LOOKS.values()]


def test_the_ways_are_those_that_are_compared():
    table = PAGE.split("`--compare` changes")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    there = variants(load_config({"base_model": "base", "trainer": {"type": "finetune"}}).config)
    assert [row[0] for row in rows] == [way.name for way in there]
    for row, way in zip(rows, there, strict=True):
        assert row[1].startswith(f"`{way.config.precision}`")
        assert (row[2] == "null") == (way.config.adapter is None)
        quantization = way.config.quantization
        assert row[3] == ("null" if quantization is None else f"`{{bits: {quantization.bits}}}`")


def test_the_python_session_is_of_names_that_exist():
    import brim
    from brim.memory import MemoryPrediction

    (session,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    compile(session, "memory.md", "exec")
    assert callable(brim.predict_memory)
    for name in re.findall(r"prediction\.([a-z_]+)", session):
        assert name in MemoryPrediction.__dataclass_fields__
