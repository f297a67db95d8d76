"""Characters that nobody typed: replacement and control characters, and UTF-8 that was read as Windows-1252."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.data.advice.finding import Finding, Keys, share

# What Windows-1252 makes of the bytes 80 to 9F; A0 to BF stay the code points of these numbers.
_CP1252 = "".join(
    bytes([byte]).decode("cp1252") for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
)
_TRAIL = f"[{_CP1252}\\x{{80}}-\\x{{BF}}]"
_BROKEN = f"\\x{{FFFD}}|[\\x00-\\x08\\x0B\\x0E-\\x1A\\x1C-\\x1F\\x7F]|[ÂÃ]{_TRAIL}|â€{_TRAIL}"


def are_broken(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which texts hold such a character. Form feeds and escape sequences of terminals are left alone."""
    found = pc.match_substring_regex(pa.array(texts, type=pa.large_string()), _BROKEN)
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def broken_characters(keys: Keys, broken: npt.NDArray[np.bool_]) -> list[Finding]:
    """Rows with such characters."""
    rows = keys[broken]
    if not len(rows):
        return []
    return [
        Finding(
            kind="broken_characters",
            what=f"{share(len(rows), len(keys))} hold characters that nobody typed (\ufffd, Ã© for é, control codes)",
            why="the model learns to write them",
            fix="read the original again with its own encoding and save it as UTF-8",
            rows=rows,
        )
    ]
