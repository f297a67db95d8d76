"""A small configuration that loads, and files to put it in."""

import textwrap
from pathlib import Path

import pytest

from brim.config import DeviceFacts, load_config, resolve
from brim.config.text import flow
from brim.errors import BrimError, ConfigError

_LONGEST = 200  # characters of a case, in a golden file
CPU = DeviceFacts(kind="cpu", bf16=False)


def choices_of(source, device=CPU, **facts):
    """Return what is chosen for a configuration: keys with their values and reasons."""
    choices = resolve(load_config(source).config, device, **facts).choices
    return {each.key: (each.value, each.reason) for each in choices}


def least(**keys):
    """The least configuration, with root keys added or replaced."""
    inputs, outputs = ([{"name": name, "type": "text"}] for name in ("prompt", "answer"))
    return {"base_model": "model", "input_features": inputs, "output_features": outputs, **keys}


@pytest.fixture
def minimal():
    return least


@pytest.fixture
def finetune(minimal):
    """The least configuration that trains, with trainer keys added."""
    return lambda **keys: minimal(trainer={"type": "finetune", **keys})


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Text as config.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("config.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return "config.yaml"

    return write


@pytest.fixture
def problems():
    """The messages with which a configuration is refused."""

    def refused(source, overrides=()):
        with pytest.raises(ConfigError) as caught:
            load_config(source, overrides)
        return [str(problem) for problem in caught.value.problems]

    return refused


@pytest.fixture
def refusals(golden):
    """refusals("name.txt", do, cases): what tests/golden/config holds of do(case): the messages below each case."""

    def compare(name, do, cases):
        lines = []
        for case in cases:
            with pytest.raises((BrimError, ValueError)) as caught:
                do(case)
            told = "\n".join(map(str, getattr(caught.value, "problems", [caught.value])))
            lines += [flow(case)[:_LONGEST], textwrap.indent(told, "    ")]
        golden(f"config/{name}", "\n".join(lines))

    return compare
