"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from typer.testing import CliRunner

from brim.cli.app import app_of

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
PROSE = {name: " ".join(page.split()) for name, page in PAGES.items()}


def blocks(name: str, language: str = "python") -> list[str]:
    """Return the fenced blocks of a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[name], flags=re.DOTALL | re.MULTILINE)


def yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def rows(name: str, after: str = "", columns: int | None = None) -> list[list[str]]:
    """Return the cells of the first table of a page after some words, without its head."""
    table = re.search(r"^\|.*\n\|[ -|]+\n((?:\|.*\n)+)", PAGES[name].split(after, 1)[1] if after else PAGES[name], re.M)
    assert table is not None
    return [[cell.strip() for cell in line.strip().strip("|").split("|")][:columns] for line in table[1].splitlines()]


@cache
def helped(verb: str) -> str:
    """Return what `--help` says of a verb."""
    found = CliRunner().invoke(app_of(), [verb, "--help"])
    assert found.exit_code == 0, verb
    return found.output
