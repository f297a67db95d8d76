"""docs/data.md: its file is read as the page says, and its configuration finds its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from brim.config import load_config
from brim.data.read import read
from brim.data.read.encoding import HEAD_BYTES
from brim.units import format_bytes

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
TABLE, NOTE = re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_the_file_is_read_as_it_is(tmp_path, encoding):
    (tmp_path / "tickets.csv").write_bytes(TABLE.replace("\n", "\r\n").encode(encoding))
    source = read(tmp_path / "tickets.csv")
    assert source.table["Kategorie"].to_pylist() == ["Störung", "Rechnung"]
    assert source.table["Betreff"].to_pylist() == ["Drucker", None]
    assert source.locate(1) == "tickets.csv:4"
    if encoding == "cp1252":
        assert source.notes == (NOTE.strip(),)


def test_the_beginning_that_decides_is_as_long_as_it_says():
    assert f"The first {format_bytes(HEAD_BYTES).replace('.0', '')} decide" in PAGE


def test_the_configuration_finds_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "tickets-2023.csv").write_text("Betreff;Kategorie\na;x\n")
    for name in ("2", "1"):
        (tmp_path / f"new/{name}.jsonl").write_text(f'{{"Kategorie": "y", "Betreff": "{name}"}}\n')
    config = load_config(YAML(typ="safe", pure=True).load(CONFIG)).config
    assert config.dataset is not None
    source = read(config.dataset)
    assert source.table["Betreff"].to_pylist() == ["a", "1", "2"]
    assert source.locate(2) == "2.jsonl:1"
