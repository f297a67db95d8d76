"""Read JSON files and JSON lines.

A JSON file is a list of objects, or one object of columns; a JSON lines file has one object a line. Python's parser
is used, since Arrow's turns text that looks like a date into a date; it is made to refuse a key that stands twice in
one object, of which it would keep the last.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from brim.data.read.arrow import read_columns
from brim.data.read.cells import FAULT, problem_of_record
from brim.data.read.columns import Record, kind_of, table_of_records
from brim.data.read.encoding import UndecodableText, first_bad_byte, require_utf8
from brim.data.read.ledger import Faulty, Unreadable
from brim.data.read.source import Source, row_number, source_of
from brim.data.read.spill import kept_or
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
        table = kept_or(
            lambda keep_as: table_of_records(partial(_json_records, path), locate=locate, keep_as=keep_as), path
        )
        return source_of(table, name=path.name, locate=locate)
    if second is not None and _is_object(first):
        return read_jsonl(path)
    require_utf8(path)
    return _read_columns(path)


def _json_records(path: Path, judged: bool) -> Iterator[Record]:
    """The elements of a list, parsed one by one, so that only the text stands in memory whole."""
    text = path.read_text(encoding="utf-8-sig", errors=_ESCAPING)
    return _judged_json(path, text) if judged else _quick_json(path, text)


def _quick_json(path: Path, text: str) -> Iterator[Record]:
    for _, _, value in _elements(path, text):
        if type(value) is not dict:
            raise Faulty
        yield value


def _judged_json(path: Path, text: str) -> Iterator[Record]:
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
            raise _error(path, _broken_json(path, text, error.pos, error.msg)) from None
        except (ValueError, RecursionError) as error:
            value, at = _refused(path, text, at, error)
        yield start, at, value
        at = _skip_blank(text, at)
        if text[at : at + 1] == "]":
            _require_end(path, text, at + 1)
            return
        if text[at : at + 1] != ",":
            raise _error(path, _broken_json(path, text, at, "Expecting ',' delimiter"))
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
        raise _error(path, _broken_json(path, text, at, "Extra data"))


def _broken_json(path: Path, text: str, at: int, message: str) -> Problem:
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
        raise DataError(_broken_json(path, text, error.pos, error.msg)) from None
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


def read_jsonl(path: Path) -> Source:
    """A file with one JSON object a line; empty lines are skipped. A line that is none is a row with a fault.

    Raises DataError where the file is of another kind.
    """
    locate = _locator(path)
    table = kept_or(
        lambda keep_as: table_of_records(partial(_jsonl_records, path), locate=locate, keep_as=keep_as), path
    )
    return source_of(table, name=path.name, locate=locate)


def _jsonl_records(path: Path, judged: bool) -> Iterator[Record]:
    return _judged_lines(path) if judged else _quick_lines(path)


def _quick_lines(path: Path) -> Iterator[Record]:
    decode = DECODER.decode
    for _, line in _lines(path):
        try:
            value = decode(line.decode())
        except (ValueError, RecursionError):
            raise Faulty from None
        if type(value) is not dict:
            raise Faulty
        yield value


def _judged_lines(path: Path) -> Iterator[Record]:
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
            problem = _broken_line(error)
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


def _broken_line(error: Exception) -> Problem:
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


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError, which is told as any other fault of the JSON."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
