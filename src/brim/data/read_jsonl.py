"""Read JSON lines: one object a line. Python's parser, since Arrow's turns text that looks like a date into a date."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from brim.data.halves import problem_of_record
from brim.data.hidden_columns import FAULT
from brim.data.json_decoder import DECODER
from brim.data.records import Record, kind_of, table_of_records
from brim.data.source import Source, source_of
from brim.data.spill import kept_or
from brim.data.unreadable import Faulty, Unreadable
from brim.data.utf8 import UndecodableText, require_utf8
from brim.errors import DataError, Problem


def read_jsonl(path: Path) -> Source:
    """A file with one JSON object a line; empty lines are skipped. A line that is none is a row with a fault.

    Raises DataError where the file is of another kind.
    """
    locate = _locator(path)
    table = kept_or(lambda keep_as: table_of_records(partial(_records, path), locate=locate, keep_as=keep_as), path)
    return source_of(table, name=path.name, locate=locate)


def _records(path: Path, judged: bool) -> Iterator[Record]:
    return _judged(path) if judged else _quick(path)


def _quick(path: Path) -> Iterator[Record]:
    decode = DECODER.decode
    for _, line in _lines(path):
        try:
            value = decode(line.decode())
        except (ValueError, RecursionError):
            raise Faulty from None
        if type(value) is not dict:
            raise Faulty
        yield value


def _judged(path: Path) -> Iterator[Record]:
    faulty = Unreadable(name=path.name, explain=partial(require_utf8, path))
    undecodable = UndecodableText(path)
    for row, (number, line) in enumerate(_lines(path)):
        try:
            value = DECODER.decode(line.rstrip(b"\r\n").decode())
            problem = problem_of_record(value) if type(value) is dict else _no_object(value)
        except UnicodeDecodeError as error:
            problem = undecodable.problem(line[error.start])
        except (ValueError, RecursionError) as error:
            _refuse_list(path, line, row)
            problem = _broken(error)
        if problem is None:
            yield value
        else:
            yield {FAULT: faulty.fault(row, problem, where=f"{path.name}:{number}")}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty, with its number (1-based). Only a line feed ends a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _broken(error: Exception) -> Problem:
    if isinstance(error, json.JSONDecodeError):
        what = f"not valid JSON: {error.msg} at character {error.pos + 1:,}"
    else:
        what = f"JSON that cannot be read: {error}"
    return Problem(what=what, expected="one JSON object a line")


def _no_object(value: Any) -> Problem:
    what = f"this line is {kind_of(value) if value is not None else 'null'}"
    return Problem(what=what, expected="one JSON object a line")


def _refuse_list(path: Path, line: bytes, row: int) -> None:
    """A list that is laid out over lines begins with its bracket."""
    if row == 0 and line.strip() == b"[":
        raise DataError(
            Problem(
                what="the file is one JSON list, not one object a line",
                where=path.name,
                fix=f"rename it to {path.with_suffix('.json').name}",
            )
        )


def _locator(path: Path) -> Callable[[int], str]:
    """Places as file:line; empty lines are looked for at the first need."""

    @lru_cache(maxsize=1)
    def lines() -> array[int]:
        return array("q", (number for number, _ in _lines(path)))

    return lambda row: f"{path.name}:{lines()[row]}"
