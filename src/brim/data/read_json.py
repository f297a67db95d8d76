"""Read a JSON file: a list of objects, or one object of columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from brim.data.halves import problem_of_record
from brim.data.hidden_columns import FAULT
from brim.data.json_decoder import DECODER
from brim.data.read_frame import read_columns
from brim.data.read_jsonl import read_jsonl
from brim.data.records import Record, kind_of, table_of_records
from brim.data.source import Source, row_number, source_of
from brim.data.spill import kept_or
from brim.data.unreadable import Faulty, Unreadable
from brim.data.utf8 import UndecodableText, first_bad_byte, require_utf8
from brim.errors import DataError, Problem

_BLANK = " \t\r\n"
_ESCAPING = "surrogateescape"  # bytes that are no text come through, and their row is told


def read_json(path: Path) -> Source:
    """A list of objects (a row each), or an object of equally long lists (a column each).

    JSON lines under this ending are read as JSON lines. An element that is no object, or that no row can hold, is a row
    with a fault. Raises DataError with line and column where parsing stops, since nothing tells where it could go on.
    """
    with path.open(encoding="utf-8-sig", errors=_ESCAPING) as file:
        filled = (line for line in file if line.strip(_BLANK))
        first, second = next(filled, "").strip(_BLANK), next(filled, None)
    if first.startswith("["):
        locate = row_number(path.name)
        table = kept_or(lambda keep_as: table_of_records(partial(_records, path), locate=locate, keep_as=keep_as), path)
        return source_of(table, name=path.name, locate=locate)
    if second is not None and _is_object(first):
        return read_jsonl(path)
    require_utf8(path)
    return _read_columns(path)


def _records(path: Path, judged: bool) -> Iterator[Record]:
    """The elements of a list, parsed one by one, so that only the text stands in memory whole."""
    text = path.read_text(encoding="utf-8-sig", errors=_ESCAPING)
    return _judged(path, text) if judged else _quick(path, text)


def _quick(path: Path, text: str) -> Iterator[Record]:
    for _, _, value in _elements(path, text):
        if type(value) is not dict:
            raise Faulty
        yield value


def _judged(path: Path, text: str) -> Iterator[Record]:
    undecodable = None if first_bad_byte(path) is None else UndecodableText(path)
    faulty = Unreadable(name=path.name, explain=partial(require_utf8, path))
    for row, (start, end, value) in enumerate(_elements(path, text)):
        problem = undecodable.problem_in(text[start:end]) if undecodable is not None else None
        if problem is None:
            problem = value if isinstance(value, Problem) else _no_row(value)
        yield value if problem is None else {FAULT: faulty.fault(row, problem, where=f"{path.name}, row {row}")}


def _elements(path: Path, text: str) -> Iterator[tuple[int, int, Any]]:
    """Where each element of the list begins and ends, and its value, or the problem of an object that is refused.

    Raises DataError where it cannot be told how the list goes on.
    """
    decode = DECODER.raw_decode
    at = _skip_blank(text, text.index("[") + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        start = at
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise _error(path, _broken(path, text, error.pos, error.msg)) from None
        except (ValueError, RecursionError) as error:
            value, at = _refused(path, text, at, error)
        yield start, at, value
        at = _skip_blank(text, at)
        if text[at : at + 1] == "]":
            _require_end(path, text, at + 1)
            return
        if text[at : at + 1] != ",":
            raise _error(path, _broken(path, text, at, "Expecting ',' delimiter"))
        at = _skip_blank(text, at + 1)


def _no_row(value: Any) -> Problem | None:
    if type(value) is not dict:
        what = f"this is {kind_of(value) if value is not None else 'null'}, not an object"
        return Problem(what=what, expected="a list of objects")
    return problem_of_record(value)


def _refused(path: Path, text: str, at: int, error: Exception) -> tuple[Problem, int]:
    """The problem of an element that is JSON but is not taken, and where it ends. Raises DataError where none is."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        raise DataError(_beyond_limits(path, text, at, error)) from None
    return Problem(what=f"JSON that cannot be read: {error}"), end


def _error(path: Path, problem: Problem) -> DataError:
    """Of a file that stops being JSON; bytes that are no text come first."""
    require_utf8(path)
    return DataError(problem)


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


def _require_end(path: Path, text: str, at: int) -> None:
    at = _skip_blank(text, at)
    if at < len(text):
        raise _error(path, _broken(path, text, at, "Extra data"))


def _broken(path: Path, text: str, at: int, message: str) -> Problem:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return Problem(
        what=f"not valid JSON: {message} at character {column:,} of the line",
        where=f"{path.name}:{line}",
        expected="a list of objects (one a row), or one object of lists (one a column)",
    )


def _beyond_limits(path: Path, text: str, at: int, error: Exception) -> Problem:
    return Problem(
        what=f"JSON that cannot be read: {error}",
        where=f"{path.name}:{text.count(chr(10), 0, at) + 1}",
        expected="a list of objects (one a row), or one object of lists (one a column)",
    )


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_columns(path: Path) -> Source:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip(_BLANK):
        raise DataError(Problem(what="the file is empty", where=path.name, expected="at least one row of data"))
    try:
        value: Any = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(_broken(path, text, error.pos, error.msg)) from None
    except (ValueError, RecursionError) as error:
        raise DataError(_beyond_limits(path, text, 0, error)) from None
    if not isinstance(value, dict) or not all(isinstance(column, list) for column in value.values()):
        found = "an object whose values are not lists" if isinstance(value, dict) else kind_of(value)
        raise DataError(
            Problem(
                what=f"the file holds {found}",
                where=path.name,
                expected="a list of objects (one a row), or one object of lists (one a column)",
            )
        )
    return read_columns(value, name=path.name)
