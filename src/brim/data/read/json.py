"""Read JSON files and JSON lines.

A JSON file is a list of objects, or one object of columns; a JSON lines file has one object a line. Python's parser
is used, since Arrow's turns text that looks like a date into a date; it is made to refuse a key that stands twice in
one object, of which it would keep the last. A row that cannot be read is an empty one of the table, and a fault.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from brim.data.read.arrow import read_columns
from brim.data.read.columns import Locate, Record, is_text, kind_of, problem_of_record, table_of_records
from brim.data.read.encoding import UndecodableText, require_utf8
from brim.data.read.ledger import Unreadable
from brim.data.read.source import Source, line_number, row_number, source_of
from brim.data.read.spill import SPILL_BYTES, Faults, kept_or
from brim.errors import DataError, Problem
from brim.units import format_bytes

_BLANK = " \t\r\n"


_BLANKS = re.compile(f"[{_BLANK}]*")


_WINDOW = 2**20  # characters of a list that are read at once, and again as many as an element takes


_LONGEST_SIGN = 16  # characters that may be cut before it is known what they are, such as -Infinity


_ESCAPING = "surrogateescape"  # bytes that are not text come through, and their row gets a fault


_HALF_OR_NUL = r"\\u(?:[dD][89a-fA-F]|0000)"  # as JSON writes half a character, or NUL; a whole one has two halves


_LIST_OR_COLUMNS = "a list of objects (one a row), or one object of lists (one a column)"


def read_json(path: Path) -> Source:
    """Read a list of objects (a row each), or an object of equally long lists (a column each).

    JSON lines under this ending are read as JSON lines. An element that is not an object, or that no row can hold, is a
    row with a fault. Raises DataError with line and column where parsing stops, where nobody knows how it goes on.
    """
    with path.open(encoding="utf-8-sig", errors=_ESCAPING) as file:
        while (sign := file.read(1)) and sign in _BLANK:
            pass
        if sign == "[":
            return _read_records(path, _elements, row_number(path.name))
        filled = (line for line in file if line.strip(_BLANK))
        first, second = sign + next(filled, ""), next(filled, None)
    if second is not None and _is_object(first):
        return read_jsonl(path)
    del first  # of a file without line breaks it is all of the text
    require_utf8(path)
    return _read_columns(path)


def read_jsonl(path: Path) -> Source:
    """Read a file with one JSON object a line; empty lines are skipped. Another line is a row with a fault.

    Raises DataError where the file is of another kind.
    """
    locate = line_number(path.name, lambda: (number for number, _ in _lines(path)))
    return _read_records(path, _objects, locate)


def _read_records(path: Path, records: Callable[[Path, Unreadable], Iterator[Record]], locate: Locate) -> Source:
    def read(keep_as: Path, faults: Faults) -> Any:
        unreadable = Unreadable(name=path.name, problems=faults, explain=partial(require_utf8, path))
        return table_of_records(lambda: records(path, unreadable), locate=locate, keep_as=keep_as, faults=faults)

    table, faults = kept_or(read, path)
    return source_of(table, name=path.name, locate=locate, faults=faults)


def _objects(path: Path, unreadable: Unreadable) -> Iterator[Record]:
    """Give the object of each line, and an empty one where the line is not an object."""
    decode, undecodable = DECODER.decode, UndecodableText(path)
    is_odd = re.compile(_HALF_OR_NUL.encode()).search
    for row, (number, line) in enumerate(_lines(path)):
        try:
            value = decode(line.rstrip(b"\r\n").decode())
            problem = None if type(value) is dict else _no_object(value, "this line is {}", "one JSON object a line")
            if problem is None and is_odd(line):
                problem = problem_of_record(value)
        except UnicodeDecodeError as error:
            problem = undecodable.problem(line[error.start])
        except (ValueError, RecursionError) as error:
            _refuse_list(path, line, row)
            problem = _broken_line(error)
        if problem is not None:
            unreadable.add(row, problem, where=f"{path.name}:{number}")
        yield value if problem is None else {}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Give each line that is not empty, with its number (1-based). Only a line feed ends a line."""
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


def _no_object(value: Any, what: str, expected: str) -> Problem:
    return Problem(what=what.format("null" if value is None else kind_of(value)), expected=expected)


def _refuse_list(path: Path, line: bytes, row: int) -> None:
    """Raise DataError for a list that is laid out over lines, which begins with its bracket."""
    if row == 0 and line.strip() == b"[":
        raise DataError(
            what="the file is one JSON list, not one object a line",
            where=path.name,
            fix=f"rename it to {path.with_suffix('.json').name}",
        )


def _elements(path: Path, unreadable: Unreadable) -> Iterator[Record]:
    """Give the elements of a list, and an empty object for one that is not an object."""
    undecodable, is_odd = UndecodableText(path), re.compile(_HALF_OR_NUL).search
    with path.open(encoding="utf-8-sig", errors=_ESCAPING) as file:
        for row, (text, value) in enumerate(_List(path, file)):
            problem = value if isinstance(value, Problem) else None
            if not is_text(text):
                problem = undecodable.problem_in(text)
            elif problem is None and type(value) is not dict:
                problem = _no_object(value, "this is {}, not an object", "a list of objects")
            elif problem is None and is_odd(text):
                problem = problem_of_record(value)
            if problem is not None:
                unreadable.add(row, problem, where=f"{path.name}, row {row}")
            yield value if problem is None else {}


class _List:
    """Parse the elements of a list in a file one by one, with no more than a window of its text in memory."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._at = "", 0
        self._line, self._before = 1, 0  # of the window's beginning: the line, and characters of it before

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Give each element's text and value, or the problem of one that is refused.

        Raises DataError where it is uncertain how the list goes on.
        """
        self._sign()
        self._at += 1  # the bracket
        if self._sign() == "]":
            return
        while True:
            yield self._element()
            sign = self._sign()
            if sign not in (",", "]"):
                raise self._broken(self._at, "Expecting ',' delimiter")
            self._at += 1
            following = self._sign()
            if sign == "]":
                if following:
                    raise self._broken(self._at, "Extra data")
                return

    def _element(self) -> tuple[str, Any]:
        self._forget()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LONGEST_SIGN
                if is_cut and self._more():
                    continue
                raise self._broken(error.pos, error.msg) from None
            except (ValueError, RecursionError) as error:
                value = Problem(what=f"JSON that cannot be read: {error}")
                try:
                    _, end = json.JSONDecoder().raw_decode(self._text, self._at)
                except (ValueError, RecursionError) as again:
                    if isinstance(again, json.JSONDecodeError) and self._more():
                        continue
                    raise DataError(
                        _beyond_limits(error, where=f"{self._path.name}:{self._place(self._at)[0]}")
                    ) from None
            if end > len(self._text) - _LONGEST_SIGN and self._more():
                continue
            text, self._at = self._text[self._at : end], end
            return text, value

    def _sign(self) -> str:
        """Return the next character that is not blank, and go there; nothing at the end of the file."""
        while True:
            self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _more(self) -> bool:
        """Read on, and return whether there was more."""
        more = self._file.read(max(_WINDOW, len(self._text) - self._at))
        self._text += more
        return bool(more)

    def _forget(self) -> None:
        """Let go of the text before an element where it is long."""
        if self._at < _WINDOW:
            return
        line, column = self._place(self._at)
        self._line, self._before = line, column - 1
        self._text, self._at = self._text[self._at :], 0

    def _place(self, at: int) -> tuple[int, int]:
        """Return line and column, from 1, of a position in the window."""
        last = self._text.rfind("\n", 0, at)
        return self._line + self._text.count("\n", 0, at), at - last if last >= 0 else self._before + at + 1

    def _broken(self, at: int, message: str) -> DataError:
        """Return the error of a file that stops being JSON. Raises DataError for bytes that are not text, if any."""
        require_utf8(self._path)
        line, column = self._place(at)
        return DataError(_broken_json(message, column, where=f"{self._path.name}:{line}"))


def _broken_json(message: str, column: int, *, where: str) -> Problem:
    what = f"not valid JSON: {message} at character {column:,} of the line"
    return Problem(what=what, where=where, expected=_LIST_OR_COLUMNS)


def _beyond_limits(error: Exception, *, where: str) -> Problem:
    return Problem(what=f"JSON that cannot be read: {error}", where=where, expected=_LIST_OR_COLUMNS)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_columns(path: Path) -> Source:
    source = read_columns(_columns(path), name=path.name)
    num_bytes = path.stat().st_size
    if num_bytes <= SPILL_BYTES:
        return source
    note = (
        f"{path.name} is one object of columns ({format_bytes(num_bytes)}): it is held in memory, several times while "
        f"it is read. JSON lines are read in parts; write them with: python -c {shlex.quote(_TO_LINES)} "
        f"{shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.jsonl')))}"
    )
    return replace(source, notes=(note,))


_TO_LINES = (
    "import json, sys; columns = json.load(open(sys.argv[1], encoding='utf-8-sig')); "
    "[print(json.dumps(dict(zip(columns, row)))) for row in zip(*columns.values())]"
)


def _columns(path: Path) -> dict[str, list[Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip(_BLANK):
        raise DataError(what="the file is empty", where=path.name, expected="at least one row of data")
    try:
        value: Any = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(_broken_json(error.msg, error.colno, where=f"{path.name}:{error.lineno}")) from None
    except (ValueError, RecursionError) as error:
        raise DataError(_beyond_limits(error, where=f"{path.name}:1")) from None
    if not isinstance(value, dict) or not all(isinstance(column, list) for column in value.values()):
        found = "an object whose values are not lists" if isinstance(value, dict) else kind_of(value)
        raise DataError(what=f"the file holds {found}", where=path.name, expected=_LIST_OR_COLUMNS)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError for a key that stands twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
