"""Text files are UTF-8; what is not is told with its place and its likely encoding."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from brim.errors import DataError, Problem

_BLOCK_BYTES = 2**22
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ESCAPED = re.compile("[\udc00-\udcff]")  # bytes that `errors="surrogateescape"` carries through a text, and NUL
ESCAPED_NUL = "\udc00"  # stands for a NUL in a text that is parsed by what does not take one


@dataclass(frozen=True, slots=True, kw_only=True)
class BadByte:
    """A byte that is no UTF-8 text."""

    value: int
    position: int  # 0-based, in the file
    line: int  # 1-based


def first_bad_byte(path: Path) -> BadByte | None:
    """Where a file stops being UTF-8 text (a NUL is none); None where all of it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
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


class UndecodableText:
    """What is told of the bytes of one file that are no UTF-8 text."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def problem(self, byte: int) -> Problem:
        """The problem of a row that holds this byte; its place is for others to fill in."""
        if byte == 0 and not self._encoding.startswith("UTF-16"):
            return Problem(what="byte 0x00 (NUL) is no text", expected="a text file in UTF-8", fix="remove it")
        return self.named(f"byte 0x{byte:02X}", where="")

    def problem_in(self, text: str) -> Problem | None:
        """The problem of the first byte that was carried through decoding by `errors="surrogateescape"`."""
        found = _ESCAPED.search(text)
        return None if found is None else self.problem(ord(found[0]) & 0xFF)

    def named(self, byte: str, *, where: str) -> Problem:
        """byte: as it is called in the message."""
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
    """Where the first byte stands that is no text, counted from what the decoder still held."""
    num_pending = len(decoder.getstate()[0])
    nul = block.find(b"\0")
    before = block if nul < 0 else block[:nul]
    try:
        decoder.decode(before, final=not block or nul >= 0)
    except UnicodeDecodeError as error:
        return error.start
    return None if nul < 0 else num_pending + nul


def likely_encoding(path: Path) -> str:
    """A guess for the message, in the name that iconv knows."""
    with path.open("rb") as file:
        start = file.read(_BLOCK_BYTES)
    if start.startswith(_UTF16_MARKS):
        return "UTF-16"
    if start.count(b"\0") * 8 > len(start):
        return "UTF-16LE" if start[1::2].count(0) > start[::2].count(0) else "UTF-16BE"
    try:
        start.decode("cp1252")
    except UnicodeDecodeError:
        return "ISO-8859-1"
    return "WINDOWS-1252"
