"""Read a JSON file: a list of objects, or one object of columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from brim.data.json_decoder import DECODER
from brim.data.read_frame import read_columns
from brim.data.read_jsonl import read_jsonl
from brim.data.records import Record, kind_of, table_of_records
from brim.data.source import Source, row_number
from brim.data.spill import kept_or
from brim.errors import DataError, Problem

_BLANK = " \t\r\n"


def read_json(path: Path) -> Source:
    """A list of objects (a row each), or an object of equally long lists (a column each).

    JSON lines under this ending are read as JSON lines. Raises DataError with line and column where parsing stops.
    """
    with path.open(encoding="utf-8-sig") as file:
        filled = (line for line in file if line.strip(_BLANK))
        first, second = next(filled, "").strip(_BLANK), next(filled, None)
    if first.startswith("["):
        locate = row_number(path.name)
        table = kept_or(lambda keep_as: table_of_records(partial(_objects, path), locate=locate, keep_as=keep_as), path)
        return Source(table=table, name=path.name, locate=locate)
    if second is not None and _is_object(first):
        return read_jsonl(path)
    return _read_columns(path)


def _objects(path: Path) -> Iterator[Record]:
    """The objects of a list, parsed one by one, so that only the text stands in memory whole."""
    text = path.read_text(encoding="utf-8-sig")
    decode = DECODER.raw_decode
    at = _skip_blank(text, text.index("[") + 1)
    if text[at : at + 1] == "]":
        return
    row = 0
    while True:
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(_broken(path, text, error.pos, error.msg)) from None
        except (ValueError, RecursionError) as error:
            raise DataError(_beyond_limits(path, text, at, error)) from None
        if type(value) is not dict:
            what = f"this is {kind_of(value) if value is not None else 'null'}, not an object"
            raise DataError(Problem(what=what, where=f"{path.name}, row {row}", expected="a list of objects"))
        yield value
        row += 1
        at = _skip_blank(text, at)
        if text[at : at + 1] == "]":
            _require_end(path, text, at + 1)
            return
        if text[at : at + 1] != ",":
            raise DataError(_broken(path, text, at, "Expecting ',' delimiter"))
        at = _skip_blank(text, at + 1)


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


def _require_end(path: Path, text: str, at: int) -> None:
    at = _skip_blank(text, at)
    if at < len(text):
        raise DataError(_broken(path, text, at, "Extra data"))


def _broken(path: Path, text: str, at: int, message: str) -> Problem:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return Problem(what=f"not valid JSON: {message} at character {column:,} of the line", where=f"{path.name}:{line}")


def _beyond_limits(path: Path, text: str, at: int, error: Exception) -> Problem:
    return Problem(what=f"JSON that cannot be read: {error}", where=f"{path.name}:{text.count(chr(10), 0, at) + 1}")


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
