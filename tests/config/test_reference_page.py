"""The page of all keys."""

from __future__ import annotations

import re

from docs.generate import EXAMPLE, reference_page

from brim.config import KEYS, all_keys, load_config
from brim.config.foreign import FOREIGN_KEYS


def test_the_example_loads(file):
    loaded = load_config(file(EXAMPLE))
    assert loaded.notes == ()


def test_every_key_is_on_the_page():
    page = reference_page()
    tables = page.split("\n## ")
    for key in all_keys():
        heading = "`" + ".".join(key.path[:-1]) + "`" if len(key.path) > 1 else "The root"
        table = next(part for part in tables if part.startswith(heading))
        assert f"\n| `{key.name}` |" in table, key.path
    for entry in KEYS:
        assert f"`{entry.key}`" in page
    for foreign in FOREIGN_KEYS:
        assert all(f"`{name}`" in page for name in foreign.names)


def test_links_lead_to_headings():
    page = reference_page()
    headings = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.M)}
    links = set(re.findall(r"\]\(#([^)]*)\)", page))
    assert links
    assert links <= headings


def test_rows_of_tables_have_equal_numbers_of_cells():
    counts = []
    for line in reference_page().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and counts and counts[-1]:
            assert cells == counts[-1], line
        counts.append(cells)
