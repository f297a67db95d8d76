"""Find out how the bytes of a text file are to be read, and name the place of what is not UTF-8.

Text files are UTF-8, except that csv in Windows-1252, and csv that begins with a byte order mark, is read, too. Arrow
takes texts with other bytes unchecked, and reading such a cell would fail.

The form of a csv file is its encoding, its separator, and a first line that names the separator. Spreadsheets write
what the country is used to: `;` where a comma stands within numbers, Windows-1252 for umlauts, UTF-16 for "Unicode
text". The beginning of the file decides, so that a large one is not looked through for it.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from brim.data.read.spill import Faults
from brim.errors import DataError, Problem
from brim.notes import warning

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


_RECORDS = 20  # that are looked at


_SEPARATOR_CHARACTERS = 2**18  # among which they are looked for


_MOST = 0.5  # more than this share of them


_SEP_LINE = re.compile(r'"?sep=(?P<sign>[!-~\t])"?(?:\r\n?|\n|\Z)', re.IGNORECASE)  # as Excel writes it


_NO_SEPARATORS = re.compile(r'[\w"]')


_PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvForm:
    """Describe how a csv file is to be read."""

    separator: str
    encoding: str = "utf-8"  # in the name that Python knows
    num_lines_before: int = 0  # before the header, and not data

    @property
    def is_utf8(self) -> bool:
        return self.encoding == "utf-8"

    @property
    def is_marked(self) -> bool:
        """Return whether the file's first bytes mark its encoding."""
        return self.encoding.startswith("utf-") and not self.is_utf8

    @property
    def has_decimal_commas(self) -> bool:
        """Return whether a comma within a cell may be a decimal comma: where commas separate fields, it may not."""
        return self.separator != ","


def csv_form(path: Path, *, usual: str) -> CsvForm:
    """Find out from a file's beginning how it is to be read. usual: the sign between fields that its ending implies."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    encoding = encoding_of(head)
    text = head.decode("utf-8-sig" if encoding == "utf-8" else encoding, errors="replace")
    if (named := _SEP_LINE.match(text)) is not None and not _NO_SEPARATORS.match(named["sign"]):
        return CsvForm(separator=named["sign"], encoding=encoding, num_lines_before=1)
    return CsvForm(separator=_separator(text, usual), encoding=encoding)


def notes_on_form(path: Path, form: CsvForm, *, usual: str) -> list[str]:
    """Return a note where the file has another form than its ending implies, with what to do where that is wrong."""
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
    """Return the usual sign, unless another cuts header and rows into equally many fields and the usual does not."""
    others = [sign for sign in _SEPARATORS if sign != usual]
    own, *scores = [_score(text, sign) for sign in (usual, *others)]
    share, num_fields = max(scores)
    other = others[scores.index((share, num_fields))]
    if own[0] <= _MOST:
        return other if share > _MOST else usual
    return other if share == 1 and (own[0] < 1 or num_fields > own[1]) else usual


def _score(text: str, sign: str) -> tuple[float, int]:
    """Return the share of the first rows with as many fields as the header, and how many; zeros for a single field."""
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
    """Allow cells of any length; the csv module's limit is the whole process's, so it is put back."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def without_undecodable(table: pa.Table, name: str) -> tuple[pa.Table, Faults]:
    """Return the table with cells that are not UTF-8 missing, and why their rows cannot be read.

    name: of the source. Raises DataError for a column that is damaged otherwise.
    """
    faults: Faults = {}
    for position, field in enumerate(table.schema):
        column = table.column(position)
        if not _holds_text(field.type) or _is_valid(column, field.name, name):
            continue
        whole, bad = _decodable(column, field.name, name)
        for row in bad:
            what = f"column `{field.name}` holds bytes that are not UTF-8 text"
            faults.setdefault(row, Problem(what=what, fix="write the text in UTF-8"))
        table = table.set_column(position, field, whole)
    return table, faults


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_text(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_valid(column: pa.ChunkedArray | pa.Array, column_name: str, name: str) -> bool:
    """Return whether all text of a column is UTF-8. Raises DataError where its offsets are damaged."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):  # Arrow looks at the texts last
            return False
        raise DataError(
            what=f"column `{column_name}` is damaged: {error}", where=name, fix="write or download the data again"
        ) from None
    return True


def _decodable(column: pa.ChunkedArray, column_name: str, name: str) -> tuple[pa.ChunkedArray, list[int]]:
    """Return the column with the cells missing that cannot be decoded, and their rows."""
    rows: list[int] = []
    chunks, first_row = [], 0
    for chunk in column.chunks:
        if not _is_valid(chunk, column_name, name):
            bad = [row for row in range(len(chunk)) if not _is_decodable(chunk[row])]
            rows += [first_row + row for row in bad]
            here = np.arange(len(chunk))
            chunk = chunk.take(pa.array(here, mask=np.isin(here, bad)))
        chunks.append(chunk)
        first_row += len(chunk)
    return pa.chunked_array(chunks, type=column.type), rows


def _is_decodable(cell: pa.Scalar) -> bool:
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True


HEAD_BYTES = 2**22  # by which an encoding is recognised


_BLOCK_BYTES = 2**22


_MARKS = {  # the longer ones first: that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


_ESCAPED = re.compile("[\udc00-\udcff]")  # bytes that `errors="surrogateescape"` carries through a text, and NUL


ESCAPED_NUL = "\udc00"  # stands for a NUL in a text that is parsed by what does not take one


@dataclass(frozen=True, slots=True, kw_only=True)
class BadByte:
    """Hold a byte that is not UTF-8 text."""

    value: int
    position: int  # 0-based, in the file
    line: int  # 1-based


def first_bad_byte(path: Path, encoding: str = "utf-8") -> BadByte | None:
    """Find where a file stops being text (NUL is not text) in UTF-8 or a one-byte encoding; None where all is text."""
    decoder = codecs.getincrementaldecoder(encoding)()
    position, line = 0, 1  # of the block's first byte
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = decoder.getstate()[0]
            at = _first_bad(decoder, block)
            if at is not None:
                data = pending + block
                return BadByte(
                    value=data[at], position=position - len(pending) + at, line=line + data.count(b"\n", 0, at)
                )
            if not block:
                return None
            position += len(block)
            line += block.count(b"\n")


def require_utf8(path: Path) -> None:
    """Raise DataError, with line and byte, at the first byte that is not UTF-8 text."""
    bad = first_bad_byte(path)
    if bad is not None:
        what = f"byte 0x{bad.value:02X} (byte {bad.position:,} of the file)"
        raise DataError(UndecodableText(path).named(what, where=f"{path.name}:{bad.line}"))


def require_marked(path: Path, encoding: str) -> None:
    """Raise DataError, with the line, where a file in UTF-16 or UTF-32 stops being text (NUL is not text)."""
    line, bad = 1, ""
    with path.open("rb") as file:
        order = "-le" if file.read(1) == b"\xff" else "-be"
        file.seek(0)
        decoder = codecs.getincrementaldecoder(f"{encoding}{order}")()
        block = b"begun"
        while block and not bad:
            block = file.read(_BLOCK_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                text, bad = error.object[: error.start].decode(f"{encoding}{order}"), error.reason
            before, nul, _ = text.partition("\0")
            line, bad = line + before.count("\n"), "byte 0x00 (NUL)" if nul else bad
    if bad:
        raise DataError(
            what=f"this is not {encoding.upper()} text, as which the file begins: {bad}",
            where=f"{path.name}:{line}",
            expected=f"a whole text file in UTF-8 or {encoding.upper()}",
            fix="save it as UTF-8 in the program that wrote it",
        )


class UndecodableText:
    """Describe the bytes of one file that are not text in UTF-8, or in the encoding in which it is read."""

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self._path, self._read_as = path, encoding

    def problem(self, byte: int) -> Problem:
        """Return the problem of a row that holds this byte, without its place."""
        if byte == 0 and not self._encoding.startswith("UTF-"):
            return Problem(what="byte 0x00 (NUL) is not text", expected="a text file in UTF-8", fix="remove it")
        if self._read_as != "utf-8":
            what = f"byte 0x{byte:02X} is not Windows-1252 text, as which the file is read"
            fix = "save the file as UTF-8 in the program that wrote it"
            return Problem(what=what, expected="a text file in UTF-8 or Windows-1252", fix=fix)
        return self.named(f"byte 0x{byte:02X}", where="")

    def problem_in(self, text: str) -> Problem | None:
        """Return the problem of the first byte that was carried through decoding by `errors="surrogateescape"`."""
        found = _ESCAPED.search(text)
        return None if found is None else self.problem(ord(found[0]) & 0xFF)

    def named(self, byte: str, *, where: str) -> Problem:
        """Return the problem of a byte, under the name that the message gives it."""
        path, encoding = self._path, self._encoding
        new = path.with_stem(f"{path.stem}-utf8").name
        return Problem(
            what=f"{byte} is not UTF-8 text; the file looks like {encoding}",
            where=where,
            expected="a text file in UTF-8",
            fix=f"save it as UTF-8, e.g. `iconv -f {encoding} -t UTF-8 {path.name} > {new}`",
        )

    @cached_property
    def _encoding(self) -> str:
        return likely_encoding(self._path)


def _first_bad(decoder: codecs.IncrementalDecoder, block: bytes) -> int | None:
    """Find the first byte that is not text, counted from the bytes that the decoder still holds."""
    num_pending = len(decoder.getstate()[0])
    nul = block.find(b"\0")
    before = block if nul < 0 else block[:nul]
    try:
        decoder.decode(before, final=not block or nul >= 0)
    except UnicodeDecodeError as error:
        return error.start
    return None if nul < 0 else num_pending + nul


def encoding_of(head: bytes) -> str:
    """Return the encoding that a file begins in, by its first HEAD_BYTES, as Python names it.

    It is "utf-8" also where bytes are not UTF-8 and no other encoding is certain: their rows get faults one by one.
    """
    marked = next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), None)
    if marked is not None:
        return marked
    is_other = b"\0" not in head and _is_other_than_utf8(head)
    return "cp1252" if is_other and _is_windows_1252(head) else "utf-8"


def likely_encoding(path: Path) -> str:
    """Guess the encoding for a message, by the name that iconv knows."""
    with path.open("rb") as file:
        start = file.read(HEAD_BYTES)
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            return encoding.upper()
    if start.count(b"\0") * 8 > len(start):
        return "UTF-16LE" if start[1::2].count(0) > start[::2].count(0) else "UTF-16BE"
    if _is_windows_1252(start):
        return "WINDOWS-1252"
    return max(_OTHERS, key=lambda name: _share_of_usual(start, *_OTHERS[name]))


def _is_other_than_utf8(head: bytes) -> bool:
    """Return whether more bytes are not UTF-8 than are letters of it. A character cut off at the end does not count."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        text = head.decode("utf-8", errors="surrogateescape")
        num_bad = len(_ESCAPED.findall(text))
        return num_bad > len(_BEYOND_ASCII.findall(text)) - num_bad
    return False


def _is_windows_1252(data: bytes) -> bool:
    """Return whether these bytes, read as Windows-1252, look like a language that is written in it.

    There, letters beyond ASCII stand alone or in short runs, and no sign or capital stands between small letters. In a
    text of another encoding, about every third does; one in twenty is allowed for.
    """
    text = data.decode("cp1252", errors="replace")
    num_odd = sum(len(found) for found in _ODD.findall(text))
    return num_odd * 20 <= len(_BEYOND_ASCII.findall(text))


def _share_of_usual(data: bytes, codec: str, usual: str) -> float:
    """Return the share of the characters beyond ASCII that are common in the languages that use an encoding."""
    beyond = "".join(_BEYOND_ASCII.findall(data.decode(codec, errors="replace")))
    return len(re.findall(f"[{usual}]", beyond)) / max(1, len(beyond))


_BEYOND_ASCII = re.compile("[^\x00-\x7f]")


_ODD = re.compile(
    "\ufffd|ÿþ|þÿ"  # five bytes have no meaning; two are the mark of UTF-16
    "|(?:(?![–—…•·“”«» ])[^\x00-\x7f]){5,}"
    "|(?<=[a-zß-öø-ÿ])[À-ÖØ-ÞŠŒŽŸ‚„†‡ˆ‰‹›¡¢£¤¥¦¨©ª«¬¯°±²³µ¶¸¹º»¼½¾¿×÷”](?=[a-zß-öø-ÿ])"
)


_OTHERS = {  # in iconv's words: Python's, and the characters; where two fit as well, the first is meant
    "WINDOWS-1251": ("cp1251", "а-яёії"),
    "KOI8-R": ("koi8_r", "а-яё"),
    "WINDOWS-1253": ("cp1253", "ά-ώ"),
    "WINDOWS-1255": ("cp1255", "א-ת"),
    "WINDOWS-1256": ("cp1256", "ء-ي"),
    "EUC-KR": ("euc_kr", "가-힣"),
    "GB18030": ("gb2312", "一-鿿，。、：；？！“”"),
    "SHIFT_JIS": ("shift_jis", "ぁ-ヿ一-鿿、。"),
    "EUC-JP": ("euc_jp", "ぁ-ヿ一-鿿、。"),
    "BIG5": ("big5", "一-鿿，。、：；？！"),
    "WINDOWS-1250": ("cp1250", "ąćęłńśźżáčďéěíňóřšťúůýžőűöüăşţâî"),
    "MACINTOSH": ("mac_roman", "ß-öø-ÿ"),
    "CP850": ("cp850", "ß-öø-ÿ"),
    "ISO-8859-1": ("latin_1", "ß-öø-ÿ"),
}
