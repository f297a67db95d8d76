"""In which form a csv file is: its encoding, the sign between its fields, and a first line that names that sign.

Spreadsheets write what the country is used to: `;` where a comma stands within numbers, Windows-1252 for umlauts,
UTF-16 for "Unicode text". The beginning of the file decides, so that a large one is not looked through for it.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from brim.data.utf8 import HEAD_BYTES, encoding_of
from brim.notes import warning

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_RECORDS = 20  # that are looked at
_SEPARATOR_CHARACTERS = 2**18  # that they are looked for in
_MOST = 0.5  # more than this share of them
_SEP_LINE = re.compile(r'"?sep=(?P<sign>[!-~\t])"?(?:\r\n?|\n|\Z)', re.IGNORECASE)  # Excel's own way of saying it
_NO_SEPARATORS = re.compile(r'[\w"]')
_PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvForm:
    """How a csv file is to be read."""

    separator: str
    encoding: str = "utf-8"  # in the name that Python knows
    num_lines_before: int = 0  # that stand before the header and are none of the data

    @property
    def is_utf8(self) -> bool:
        return self.encoding == "utf-8"

    @property
    def is_marked(self) -> bool:
        """Whether the file's first bytes say its encoding."""
        return self.encoding.startswith("utf-") and not self.is_utf8

    @property
    def has_decimal_commas(self) -> bool:
        """Whether a comma within a cell may be the point of a number: where commas separate fields, it may not."""
        return self.separator != ","


def csv_form(path: Path, *, usual: str) -> CsvForm:
    """How the file is to be read, by its beginning. usual: the sign between fields that its ending says."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    encoding = encoding_of(head)
    text = head.decode("utf-8-sig" if encoding == "utf-8" else encoding, errors="replace")
    if (said := _SEP_LINE.match(text)) is not None and not _NO_SEPARATORS.match(said["sign"]):
        return CsvForm(separator=said["sign"], encoding=encoding, num_lines_before=1)
    return CsvForm(separator=_separator(text, usual), encoding=encoding)


def notes_on_form(path: Path, form: CsvForm, *, usual: str) -> list[str]:
    """A note where the file is of another form than its ending says, with what to do where that is wrong."""
    name, new = (path.name, f"{path.stem}-utf8{path.suffix}")
    if not _PLAIN_NAME.fullmatch(path.name):  # a name is part of a command only where no shell reads more into it
        name, new = "FILE", "NEW_FILE"
    found, otherwise = [], []
    if not form.is_utf8:
        found.append(f"as {_SHOWN.get(form.encoding, form.encoding.upper())}")
        otherwise.append(f"save it as UTF-8, as with `iconv -f ENCODING -t UTF-8 {name} > {new}`")
    if form.separator != usual and not form.num_lines_before:
        found.append(f"with {_SEPARATORS[form.separator]} between its fields")
        otherwise.append(f"give it a first line that names the sign, such as sep={usual if usual != chr(9) else ','}")
    if not found:
        return []
    short = f"{path.name} is read {', '.join(found)}"
    return [warning(f"{short}; if that is wrong, {', or '.join(otherwise)}", topic="rows", short=short)]


_SHOWN = {"cp1252": "Windows-1252", "utf-16": "UTF-16", "utf-32": "UTF-32"}


def _separator(text: str, usual: str) -> str:
    """The usual one, unless another sign cuts header and rows into equally many fields where the usual one does not."""
    others = [sign for sign in _SEPARATORS if sign != usual]
    own, *scores = [_score(text, sign) for sign in (usual, *others)]
    share, num_fields = max(scores)
    other = others[scores.index((share, num_fields))]
    if own[0] <= _MOST:
        return other if share > _MOST else usual
    return other if share == 1 and (own[0] < 1 or num_fields > own[1]) else usual


def _score(text: str, sign: str) -> tuple[float, int]:
    """The share of the first rows that have as many fields as the header, and how many; nothing for a single one."""
    lines = io.StringIO(text[:_SEPARATOR_CHARACTERS].replace("\0", ""), newline="")
    with long_fields():
        records = [cells for cells in islice(csv.reader(lines, delimiter=sign), _RECORDS) if cells]
    if len(text) >= _SEPARATOR_CHARACTERS and len(records) < _RECORDS:
        records = records[:-1]  # it may be cut
    if len(records) < 2 or len(records[0]) < 2:
        return 0.0, 0
    header, *rows = records
    return sum(len(row) == len(header) for row in rows) / len(rows), len(header)


@contextmanager
def long_fields() -> Iterator[None]:
    """Cells may be of any length; the csv module's limit is the whole process's, so it is put back."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
