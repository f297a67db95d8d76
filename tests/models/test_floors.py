"""Libraries that are too old are not trusted."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from brim.errors import InputError
from brim.models import require_floors
from brim.models.folder import FLOORS

ROOT = Path(__file__).parents[2]


def test_what_is_installed_is_new_enough():
    require_floors()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            {"transformers": "5.2.9", "accelerate": "1.15.0"},
            "transformers 5.2.9 is too old\n  expected: 5.3 or later: ",
        ),
        ({"transformers": "4.99", "accelerate": "1.15.0"}, "transformers 4.99 is too old\n"),
        ({"transformers": "5.10.dev0", "accelerate": "1.9.0"}, "accelerate 1.9.0 is too old\n"),
    ],
)
def test_an_older_one_is_named(monkeypatch, versions, message):
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    with pytest.raises(InputError) as caught:
        require_floors()
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"this Python environment: {message}")


def test_the_package_asks_for_the_same():
    asked = (ROOT / "pyproject.toml").read_text()
    for name, (floor, _) in FLOORS.items():
        assert f'"{name}>={".".join(map(str, floor))}' in asked
