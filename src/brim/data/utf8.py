"""Text files are UTF-8; what is not is told with its place and its likely encoding."""

from __future__ import annotations

import codecs
from pathlib import Path

from brim.errors import DataError, Problem

_BLOCK_BYTES = 2**22
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def require_utf8(path: Path) -> None:
    """Raise DataError, with line and byte, at the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, line = 0, 1  # of the block's first byte
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                data = bytes(error.object)
                at = error.start
                lines_before = data.count(b"\n", 0, at)
                raise DataError(
                    _not_utf8(path, data[at], position - len(pending) + at, line + lines_before, data[:64] + data[at:])
                ) from None
            if not block:
                return
            position += len(block)
            line += block.count(b"\n")


def _not_utf8(path: Path, byte: int, position: int, line: int, sample: bytes) -> Problem:
    encoding = likely_encoding(path)
    new = path.with_stem(f"{path.stem}-utf8").name
    return Problem(
        what=f"byte 0x{byte:02X} (byte {position:,} of the file) is not UTF-8; the file looks like {encoding}",
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
    try:
        start.decode("cp1252")
    except UnicodeDecodeError:
        return "ISO-8859-1"
    return "WINDOWS-1252"
