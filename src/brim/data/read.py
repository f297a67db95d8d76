"""Read a data set, whatever it comes as, into one table."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from brim.config import mask_login
from brim.data.read_csv import read_csv
from brim.data.read_files import Files, is_files, named_files, read_files
from brim.data.read_folder import read_dataset, read_folder
from brim.data.read_frame import read_columns, read_pandas, read_rows, read_table
from brim.data.read_json import read_json
from brim.data.read_jsonl import read_jsonl
from brim.data.read_parquet import read_parquet
from brim.data.row_faults import is_majority, require_minority
from brim.data.source import Source, require_rows
from brim.data.utf8 import require_utf8
from brim.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets
    import pandas as pd

Data: TypeAlias = (
    "Files | pd.DataFrame | datasets.Dataset | datasets.DatasetDict | pa.Table | "
    "Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]"
)
Reader = Callable[[Path], Source]


def read(source: Data) -> Source:
    """A file (by its ending), a folder that `datasets` saved, or what is in memory.

    That is a pandas frame, an Arrow table, a Dataset or DatasetDict of `datasets`, a dict of columns, a list of dicts.
    A file may be a glob, and several files may stand in a list: their rows are read one file after the other.
    Large files are memory-mapped. A row that cannot be read is a fault of the source (see usable.py). Raises DataError,
    with the file and line, where that holds for more than half of the rows, or the file as a whole cannot be read.
    """
    if isinstance(source, list | tuple) and is_files(source):
        files = named_files(source)
        return _read_named(files[0]) if len(files) == 1 else read_files(files, _read_named)
    if isinstance(source, str | Path):
        return read([source])
    if isinstance(source, pa.Table):
        return _checked(read_table(source))
    # Who has a frame, or a data set of `datasets`, has imported it.
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(source, pandas.DataFrame):
        return _checked(read_pandas(source))
    # A package of that name may be the user's own.
    kinds = [getattr(datasets, name, None) for name in ("Dataset", "DatasetDict")]
    if isinstance(source, tuple(kind for kind in kinds if isinstance(kind, type))):
        return _checked(read_dataset(source))
    if isinstance(source, Mapping):
        return _checked(read_columns(source))
    if isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        return _checked(read_rows(source))
    raise DataError(_no_data(source))


def _no_data(source: object) -> Problem:
    kind = type(source).__name__
    if isinstance(source, list | tuple):
        kinds = sorted({type(each).__name__ for each in source})
        kind = f"{kind} of {' and '.join(kinds)}"
    return Problem(
        what=f"a data set cannot be of the type {kind}",
        expected="a path or a list of paths, a pandas frame, a dict of columns, a list of dicts, an Arrow table, or a "
        "Dataset or DatasetDict of `datasets`",
        fix="a stream or an iterator is not read: save it to a file, or make a list of it",
    )


def _read_named(file: str | Path) -> Source:
    if not str(file).strip():
        raise DataError(Problem(what="an empty path was given as the data set", expected="a file, or a saved folder"))
    return _read_path(_path(file))


def _csv(path: Path) -> Source:
    return read_csv(path, separator=",")


def _tsv(path: Path) -> Source:
    return read_csv(path, separator="\t")


_JSON_READERS: dict[str, Reader] = {".json": read_json, ".jsonl": read_jsonl, ".ndjson": read_jsonl}
_TEXT_ENDINGS = (".csv", ".tsv", *_JSON_READERS)
_READ = "csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`"
_READERS: dict[str, Reader] = {
    ".csv": _csv,
    ".tsv": _tsv,
    **_JSON_READERS,
    ".parquet": read_parquet,
    ".pq": read_parquet,
}


def _path(source: str | Path) -> Path:
    """Raises DataError for what no file can be called."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, the home of nobody
        reason = getattr(error, "strerror", None) or str(error)
        what = f"no file can be read by this name ({reason}): {mask_login(str(source))[:60]!r}"
        raise DataError(Problem(what=what, expected="a file, or a saved folder", fix="check the path")) from None
    return path


def _read_path(path: Path) -> Source:
    if not path.exists():
        raise DataError(_no_such_file(path))
    if path.is_dir():
        return _checked(read_folder(path))
    if not path.is_file():
        what, fix = "this is no regular file", "save the data to a file"
        raise DataError(Problem(what=what, where=str(path), expected="a file, or a saved folder", fix=fix))
    ending = path.suffix.lower()
    if ending not in _READERS:
        raise DataError(_unknown_ending(path))
    try:
        if path.stat().st_size == 0:
            raise DataError(Problem(what="the file is empty", where=path.name, expected="at least one row of data"))
        if ending in _TEXT_ENDINGS:
            _require_no_archive(path)
        source = _READERS[ending](path)
        if ending in _JSON_READERS and is_majority(source.faults, source.table.num_rows):
            require_utf8(path)  # tells best why nothing can be read
        return _checked(source)
    except PermissionError:
        raise DataError(Problem(what="the file may not be read", where=str(path), fix="check its permissions"))


def _checked(source: Source) -> Source:
    require_minority(source.faults, source.locate, num_rows=source.table.num_rows, name=source.name)
    require_rows(source.table, source.name)
    return source


def _require_no_archive(path: Path) -> None:
    """Raise DataError for what was given the ending of a text file and is something else by its first bytes."""
    with path.open("rb") as file:
        head = file.read(8)
    for start, (what, fix) in _ARCHIVES.items():
        if head.startswith(start):
            expected = f"a text file, as the ending {path.suffix} says"
            raise DataError(Problem(what=f"the file is {what}", where=path.name, expected=expected, fix=fix))


_AS_CSV = "open it in the program that wrote it and save the sheet as csv (in Excel: Save As, CSV UTF-8)"
_ARCHIVES = {
    b"PK\x03\x04": ("a spreadsheet or a zip archive", f"{_AS_CSV}; or unpack it"),
    b"\xd0\xcf\x11\xe0": ("an old Excel file", _AS_CSV),
    b"\x1f\x8b": ("compressed by gzip", "unpack it with gunzip, once it is named as such (.gz)"),
    b"PAR1": ("parquet", "rename it to .parquet"),
}
_BY_ENDING = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"), ("a spreadsheet", _AS_CSV)),
    **dict.fromkeys((".zip", ".7z", ".tar", ".rar"), ("an archive", "unpack it, and name the file that it holds")),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst"), ("compressed", "unpack it, and name the file that it holds")),
}


def _no_such_file(path: Path) -> Problem:
    parent = path.parent
    if not parent.is_dir():
        what = mask_login(f"no such file: {path} (there is no folder {parent})")
        return Problem(what=what, fix="check the path")
    nearest = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    fix = f"did you mean {parent / nearest[0]}?" if nearest else "check the path; it is taken from the current folder"
    return Problem(what=f"no such file: {path}", fix=fix)


def _unknown_ending(path: Path) -> Problem:
    kind = _BY_ENDING.get(path.suffix.lower())
    if kind is not None:
        what, fix = kind
        return Problem(what=f"the file is {what}, which is not read", where=str(path), expected=_READ, fix=fix)
    ending = (
        f"the ending {path.suffix!r} is not known" if path.suffix else "the file has no ending that says its format"
    )
    return Problem(
        what=ending,
        where=str(path),
        expected=_READ,
        fix="rename the file to what it holds, or convert it",
    )
