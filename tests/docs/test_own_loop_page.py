"""docs/own-loop.md: its examples run as they stand, one after the other."""

import inspect
import re
from pathlib import Path

import pytest

import brim

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-loop.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_examples_run(capsys):
    names: dict[str, object] = {}
    printed = []
    for block in BLOCKS:
        exec(compile(block, "own-loop.md", "exec"), names)  # noqa: S102
        printed.append(capsys.readouterr().out.split())
    losses, by_token, by_length, events = printed
    assert len(losses) == 4
    assert [float(loss) for loss in losses] == pytest.approx([1.4] * 4, abs=0.3)  # ln 4, by chance
    assert len(by_token) == len(by_length) == 1
    assert float(by_token[0]) > 0
    assert float(by_length[0]) > 0
    assert events == []  # nothing ran out of memory


def test_the_example_is_the_first_of_the_page():
    example = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
    docstring, code = example.split("\n\n", 1)
    assert docstring.startswith('"""')
    assert code == BLOCKS[0]


def test_every_option_is_explained():
    options = inspect.signature(brim.AdaptiveStep).parameters
    for name in options.keys() - {"model", "loss"}:
        assert f"`{name}" in PAGE or f"{name}=" in PAGE, name
    described = inspect.getdoc(brim.AdaptiveStep)
    for name in options:
        assert re.search(rf"^{name}: ", described, flags=re.MULTILINE), name
