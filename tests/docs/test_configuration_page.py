"""docs/configuration.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from docs.generate import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "run `make docs`"
