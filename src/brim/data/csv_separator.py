"""Files whose fields are separated by another sign than their ending says: spreadsheets in many languages write `;`."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from brim.data.csv_records import first_records
from brim.errors import DataError, Problem

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_PLAIN = re.compile(r"[\w.-]+")
_RECORDS = 20  # that are looked at


def require_separator(path: Path, names: list[str], separator: str) -> None:
    """Raise DataError where the header is one field and another sign cuts it, and the rows below, into several."""
    if len(names) != 1:
        return
    for other in _SEPARATORS:
        if other != separator and other in names[0] and _cuts_alike(path, other):
            raise DataError(_separated_by(path, other, separator))


def _cuts_alike(path: Path, separator: str) -> bool:
    counts = {len(cells) for cells in islice(first_records(path, separator), _RECORDS)}
    return len(counts) == 1 and counts != {1}


def _separated_by(path: Path, found: str, wanted: str) -> Problem:
    sign = "'\\t'" if found == "\t" else f"'{found}'"
    # A name is part of a command only where no shell reads more into it.
    name, new = (path.name, f"{path.stem}-commas.csv") if _PLAIN.fullmatch(path.name) else ("FILE", "NEW_FILE")
    convert = (
        f'python -c "import pandas; pandas.read_csv({name!r}, sep={sign}, dtype=str, keep_default_na=False)'
        f'.to_csv({new!r}, index=False)"'
    )
    rename = "rename it to .tsv, or " if found == "\t" else "rename it to .csv, or " if found == "," else ""
    return Problem(
        what=f"the fields are separated by {_SEPARATORS[found]}",
        where=f"{path.name}:1",
        expected=f"{_SEPARATORS[wanted]}, as the ending {path.suffix} says",
        fix=f"{rename}write it anew with commas: {convert}",
    )
