"""The structure as it is read from text, and the sizes beside their budgets."""

from __future__ import annotations

import pytest
from tools.sizes import over, sizes
from tools.structure import House, read_house
from tools.walks import counted
from tools.words import has_verb

FILES = {
    "errors.py": '"""Errors."""\n\nclass BrimError(Exception):\n    """Any."""\n',
    "data/__init__.py": '"""Data."""\n',
    "data/__init__.pyi": "from .rows import Rows as Rows\n",
    "data/rows.py": '''"""Rows.

More of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.errors import BrimError  # a comment

if TYPE_CHECKING:
    from brim.train.loop import Loop


def rows(loop: Loop) -> None:
    """Return nothing.

    At all.
    """
    # why

    raise BrimError
''',
    "train/__init__.py": "",
    "train/loop.py": "from brim.data import Rows\n\n\ndef loop():\n    from . import other\n    import brim.errors\n",
}


@pytest.fixture
def house(tmp_path) -> House:
    for name, text in FILES.items():
        path = tmp_path / "brim" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_house(tmp_path)


def test_imports_are_of_the_module_that_defines_a_name(house):
    found = {
        module.name: [(each.source, each.module, each.name, each.is_relative) for each in house.imports(module)]
        for module in house.modules
    }
    assert found == {
        "brim.data.rows": [("brim.errors", "brim.errors", "BrimError", False)],  # not what only type checkers read
        "brim.errors": [],
        "brim.train.loop": [
            ("brim.data", "brim.data.rows", "Rows", False),
            ("", "", None, True),
            ("brim.errors", "brim.errors", None, False),  # within a function, too
        ],
    }


def test_code_is_what_is_neither_blank_nor_comment_nor_docstring(house):
    rows = next(module for module in house.modules if module.name == "brim.data.rows")
    assert (rows.num_code_lines, rows.num_import_lines, rows.function_lines) == (7, 4, (8,))
    assert (rows.package, rows.layer) == ("brim.data", "data")


def test_what_is_over_its_budget_is_told(house):
    found = sizes(house)
    assert found["brim.data"] == {"modules": 1, "code": 7, "p90": 8, "imports": 17, "face": 1}
    assert found["all"]["modules"] == 3
    assert over(found, found) == []
    less = {**found, "brim.data": {**found["brim.data"], "code": 6}}
    assert over(found, less) == ["brim.data: 7 code, the budget is 6"]
    del less["brim.train"]
    assert "brim.train has no budget" in over(found, less)


def test_a_walk_counts_modules_functions_and_what_leads_from_a_package_to_another():
    functions = [("brim.cli.app", "main"), ("brim.cli.app", "run"), ("brim.memory.trace.record", "record")]
    calls = [
        ("brim.cli.app", "brim.memory.trace.record"),
        ("brim.memory.trace.record", "brim.memory.predict"),
        ("brim.cli.app", "brim.units"),
    ]
    assert counted(functions, calls) == (2, 3, 3, 2)


def test_a_docstring_begins_with_what_is_done_or_is_a_sentence():
    sentences = [
        "Return the rows of a batch.",
        "Write one line; a signal may cut it short.",
        "Rows are padded to the longest.",
        "A kernel takes as long as its arithmetic.",
        "Whole steps must be left.\n\nThe rest is dropped.",
        "Cut rows by their lengths.",
    ]
    others = [
        "What a run takes.",
        "The rows that are left.",
        "A finished run.",
        "As trainer.eval_batch_size says.",
        "[B, T] of the tokens.",
        "Where nothing is written.",
    ]
    assert [each for each in sentences + others if has_verb(each)] == sentences
