"""A small configuration that loads, and files to put it in."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.golden import Golden

from brim.config import Choice, DeviceFacts, load_config, resolve
from brim.config.text import flow
from brim.errors import BrimError, ConfigError

_LONGEST = 200  # characters of a case, in a golden file
CPU = DeviceFacts(kind="cpu", bf16=False)


def choices_of(source: dict[str, Any], device: DeviceFacts = CPU, **facts: Any) -> dict[str, tuple[Any, str]]:
    """Return what is chosen for a configuration: keys with their values and reasons."""
    choices: tuple[Choice, ...] = resolve(load_config(source).config, device, **facts).choices
    return {each.key: (each.value, each.reason) for each in choices}


@pytest.fixture
def minimal() -> Callable[..., dict[str, Any]]:
    """The least configuration, with root keys added or replaced."""

    def build(**keys: Any) -> dict[str, Any]:
        return {
            "base_model": "model",
            "input_features": [{"name": "prompt", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            **keys,
        }

    return build


@pytest.fixture
def finetune(minimal: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The least configuration that trains, with trainer keys added."""

    def build(**keys: Any) -> dict[str, Any]:
        return minimal(trainer={"type": "finetune", **keys})

    return build


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], str]:
    """Text as config.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        content = text.encode() if isinstance(text, str) else text
        Path("config.yaml").write_bytes(content)
        return "config.yaml"

    return write


@pytest.fixture
def problems() -> Callable[..., list[str]]:
    """The messages with which a configuration is refused."""

    def refused(source: Any, overrides: tuple[str, ...] = ()) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(source, overrides)
        return [str(problem) for problem in caught.value.problems]

    return refused


@pytest.fixture
def refusals(golden: Golden) -> Callable[..., None]:
    """refusals("name.txt", do, cases): what tests/golden/config holds of do(case): the messages below each case."""

    def compare(name: str, do: Callable[[Any], object], cases: Iterable[Any]) -> None:
        lines = []
        for case in cases:
            with pytest.raises((BrimError, ValueError)) as caught:
                do(case)
            told = "\n".join(map(str, getattr(caught.value, "problems", [caught.value])))
            lines += [flow(case)[:_LONGEST], textwrap.indent(told, "    ")]
        golden(f"config/{name}", "\n".join(lines))

    return compare
