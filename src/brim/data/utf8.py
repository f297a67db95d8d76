"""Text files are UTF-8; what is not is told with its place and its likely encoding."""

from __future__ import annotations

import codecs
from pathlib import Path

from brim.errors import DataError, Problem

_BLOCK_BYTES = 2**22
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def require_utf8(path: Path) -> None:
    """Raise DataError, with line and byte, at the first byte that is not UTF-8 text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, line = 0, 1  # of the block's first byte
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = decoder.getstate()[0]
            at = _first_bad(decoder, block)
            if at is not None:
                data = pending + block
                raise DataError(
                    _not_utf8(path, data[at], position - len(pending) + at, line + data.count(b"\n", 0, at))
                )
            if not block:
                return
            position += len(block)
            line += block.count(b"\n")


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


def _not_utf8(path: Path, byte: int, position: int, line: int) -> Problem:
    encoding = likely_encoding(path)
    new = path.with_stem(f"{path.stem}-utf8").name
    return Problem(
        what=f"byte 0x{byte:02X} (byte {position:,} of the file) is not UTF-8 text; the file looks like {encoding}",
        where=f"{path.name}:{line}",
        expected="a text file in UTF-8",
        fix=f"save it as UTF-8, e.g. `iconv -f {encoding} -t UTF-8 {path.name} > {new}`",
    )


def likely_encoding(path: Path) -> str:
    """A guess for the message, in the name that iconv knows."""
    with path.open("rb") as file:
        start = file.read(_BLOCK_BYTES)
    if start.startswith(_UTF16_MARKS):
        return "UTF-16"
    if b"\0" in start:
        return "UTF-16LE" if start[1::2].count(0) > start[::2].count(0) else "UTF-16BE"
    try:
        start.decode("cp1252")
    except UnicodeDecodeError:
        return "ISO-8859-1"
    return "WINDOWS-1252"
