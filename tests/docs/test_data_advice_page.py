"""docs/data-advice.md names every kind of advice, the most important first."""

import re
from pathlib import Path

from brim.data.advice.finding import ORDER

PAGE = (Path(__file__).parents[2] / "docs" / "data-advice.md").read_text(encoding="utf-8")


def test_the_page_has_every_kind_in_order():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(ORDER)


def test_every_kind_is_made_somewhere():
    source = Path(__file__).parents[2] / "src" / "brim" / "data" / "advice"
    code = "".join(path.read_text(encoding="utf-8") for path in source.glob("*.py") if path.name != "finding.py")
    made = set(re.findall(r'(?:kind=|: )"(\w+)"', code))
    assert set(ORDER) <= made
