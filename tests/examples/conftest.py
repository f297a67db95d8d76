"""The examples as a user runs them: with examples/ on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

if TYPE_CHECKING:
    from stdlib_code.dataset import Module, Row


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    from stdlib_code.dataset import stdlib_modules

    return stdlib_modules()


@pytest.fixture(scope="session")
def rows(modules: list[Module]) -> list[Row]:
    from stdlib_code.dataset import instruction_rows

    return instruction_rows(modules)
