"""Read JSON lines: one object a line. Python's parser, since Arrow's turns text that looks like a date into a date."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from brim.data.json_decoder import DECODER
from brim.data.records import Record, kind_of, table_of_records
from brim.data.source import Source
from brim.data.spill import kept_or
from brim.errors import DataError, Problem

_MAX_PROBLEMS = 5


def read_jsonl(path: Path) -> Source:
    """A file with one JSON object a line; empty lines are skipped. Raises DataError naming each broken line."""
    locate = _locator(path)
    table = kept_or(lambda keep_as: table_of_records(partial(_objects, path), locate=locate, keep_as=keep_as), path)
    return Source(table=table, name=path.name, locate=locate)


def _objects(path: Path) -> Iterator[Record]:
    for _, line in _lines(path):
        try:
            value = DECODER.decode(line.decode())
        except (ValueError, RecursionError):
            raise DataError(*_problems(path)) from None
        if type(value) is not dict:
            raise DataError(*_problems(path))
        yield value


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty, with its number (1-based). Only a line feed ends a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _problems(path: Path) -> list[Problem]:
    """What is wrong in the file, the first few lines located and the others counted."""
    problems: list[Problem] = []
    num_more = 0
    for number, line in _lines(path):
        what = _what_is_wrong(line)
        if what is None:
            continue
        if not problems and line.strip() == b"[":
            return [_looks_like_json(path)]
        if len(problems) < _MAX_PROBLEMS:
            problems.append(Problem(what=what, where=f"{path.name}:{number}", expected="one JSON object a line"))
        else:
            num_more += 1
    if num_more:
        problems.append(Problem(what=f"{num_more:,} more lines are broken", where=path.name))
    return problems


def _what_is_wrong(line: bytes) -> str | None:
    try:
        value: Any = DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at character {error.pos + 1:,}"
    except (ValueError, RecursionError) as error:
        return f"JSON that cannot be read: {error}"
    return None if type(value) is dict else f"this line is {kind_of(value) if value is not None else 'null'}"


def _looks_like_json(path: Path) -> Problem:
    return Problem(
        what="the file is one JSON list, not one object a line",
        where=path.name,
        fix=f"rename it to {path.with_suffix('.json').name}",
    )


def _locator(path: Path) -> Callable[[int], str]:
    """Places as file:line; empty lines are looked for at the first need."""

    @lru_cache(maxsize=1)
    def lines() -> array[int]:
        return array("q", (number for number, _ in _lines(path)))

    return lambda row: f"{path.name}:{lines()[row]}"
