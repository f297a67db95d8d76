"""What a failed verb tells: all problems, plain and without secrets, as lines or, with --json, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from brim.config.mask import mask_text
from brim.errors import Problem

_LONGEST_LINE = 1_000  # characters


def message(problems: Iterable[Problem]) -> str:
    """Problems as lines."""
    return "\n".join(plain(str(problem)) for problem in problems)


def json_message(kind: str, problems: Iterable[Problem], exit_code: int) -> str:
    """The same as one JSON object, on one line. kind: the error's class."""
    told = [{name: mask_text(text) for name, text in asdict(problem).items()} for problem in problems]
    return json.dumps({"error": {"kind": kind, "exit_code": exit_code, "problems": told}})


def plain(text: str) -> str:
    """Without secrets, without characters that would steer the terminal, without endless lines."""
    return "\n".join(_shortened(printable(line)) for line in mask_text(text).split("\n"))


def printable(text: str, *, kept: str = "") -> str:
    """A text whose characters that would steer the terminal are spelled out, but for those in `kept`."""
    if text.isprintable():
        return text
    plain = ((each.isprintable() or each in kept, each) for each in text)
    return "".join(each if is_plain else each.encode("unicode_escape").decode() for is_plain, each in plain)


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"
