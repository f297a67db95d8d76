"""Read a data set, whatever it comes as, into one table.

Several files, by their names and globs, are one data set: their rows come one after the other.
"""

from __future__ import annotations

import difflib
import glob
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from brim.config.text import mask_login
from brim.data.read.arrow import (
    read_columns,
    read_dataset,
    read_folder,
    read_pandas,
    read_parquet,
    read_rows,
    read_table,
    table_of_columns,
)
from brim.data.read.columns import cell_texts, nested_word, problem_of, with_problem
from brim.data.read.csv import read_csv
from brim.data.read.encoding import require_utf8
from brim.data.read.json import read_json, read_jsonl
from brim.data.read.ledger import RowFaults, is_majority
from brim.data.read.source import Source, listed_columns
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
    """Read a file (by its ending), a folder that `datasets` saved, or data in memory.

    Data in memory is a pandas frame, an Arrow table, a Dataset or DatasetDict of `datasets`, a dict of columns, or a
    list of dicts. A file may be a glob, and several files may stand in a list: their rows follow one another. Large
    files are memory-mapped. A row that cannot be read is a fault of the source (see split.py). Raises DataError, with
    the file and line, where that holds for more than half of the rows, or the file as a whole cannot be read.
    """
    if isinstance(source, list | tuple) and is_files(source):
        files = named_files(source)
        return _read_named(files[0]) if len(files) == 1 else read_files(files, _read_named)
    if isinstance(source, str | Path):
        return read([source])
    if isinstance(source, pa.Table):
        return _checked(read_table(source))
    # Whoever passes a frame, or a data set of `datasets`, has imported its package.
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
        raise DataError(what="an empty path was given as the data set", expected="a file, or a saved folder")
    return _read_path(_path(file))


_JSON_READERS: dict[str, Reader] = {".json": read_json, ".jsonl": read_jsonl, ".ndjson": read_jsonl}


_TEXT_ENDINGS = (".csv", ".tsv", *_JSON_READERS)


_READ = "csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`"


_READERS: dict[str, Reader] = {
    ".csv": partial(read_csv, separator=","),
    ".tsv": partial(read_csv, separator="\t"),
    **_JSON_READERS,
    ".parquet": read_parquet,
    ".pq": read_parquet,
}


def _path(source: str | Path) -> Path:
    """Return the path. Raises DataError for a name that no file can have."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, an unknown user's home
        reason = getattr(error, "strerror", None) or str(error)
        what = f"no file can be read by this name ({reason}): {mask_login(str(source))[:60]!r}"
        raise DataError(what=what, expected="a file, or a saved folder", fix="check the path") from None
    return path


def _read_path(path: Path) -> Source:
    if not path.exists():
        raise DataError(_no_such_file(path))
    if path.is_dir():
        return _checked(read_folder(path))
    if not path.is_file():
        what, fix = "this is not a regular file", "save the data to a file"
        raise DataError(what=what, where=str(path), expected="a file, or a saved folder", fix=fix)
    ending = path.suffix.lower()
    if ending not in _READERS:
        raise DataError(_unknown_ending(path))
    try:
        if path.stat().st_size == 0:
            raise DataError(what="the file is empty", where=path.name, expected="at least one row of data")
        if ending in _TEXT_ENDINGS:
            _require_no_archive(path)
        source = _READERS[ending](path)
        if ending in _JSON_READERS and is_majority(source.faults, source.table.num_rows):
            require_utf8(path)  # explains best why nothing can be read
        return _checked(source)
    except PermissionError:
        raise DataError(what="the file may not be read", where=str(path), fix="check its permissions")


def _checked(source: Source) -> Source:
    num_rows = max(source.table.num_rows, len(source.faults))  # a table of bad rows alone has no columns, and no rows
    RowFaults(locate=source.locate, problems=dict(source.faults)).require_minority(num_rows, source.name)
    if source.table.num_columns == 0 or source.table.num_rows == 0:
        raise DataError(
            what="the data set has no rows",
            where=source.name,
            expected="at least one row of data",
            fix="look at what makes it, such as a filter that keeps no row, or give another one",
        )
    return source


def _require_no_archive(path: Path) -> None:
    """Raise DataError for a file that has the ending of a text file and is something else by its first bytes."""
    with path.open("rb") as file:
        head = file.read(8)
    for start, (what, fix) in _ARCHIVES.items():
        if head.startswith(start):
            expected = f"a text file, as the ending {path.suffix} says"
            raise DataError(what=f"the file is {what}", where=path.name, expected=expected, fix=fix)


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
    return Problem(what=ending, where=str(path), expected=_READ, fix="rename the file to what it holds, or convert it")


Files: TypeAlias = "str | Path | Sequence[str | Path]"


_GLOB = frozenset("*?[")


_SHOWN = 5  # names in a message


def is_files(data: object) -> bool:
    """Return whether these are the names of one or more files."""
    return isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(name, str | Path) for name in data)
    )


def absolute_files(files: Files) -> str | tuple[str, ...]:
    """Return the names as absolute paths. One that leads nowhere stays so, and fails when it is read."""
    names = [files] if isinstance(files, str | Path) else files
    # pathlib's own raise for a loop of links and for an unknown user's home.
    paths = tuple(os.path.realpath(os.path.expanduser(name)) for name in names)  # noqa: PTH111
    return paths[0] if len(paths) == 1 else paths


def named_files(files: Files) -> list[str | Path]:
    """Return the files by their names, those of a glob in alphabetical order.

    Raises DataError for a glob that matches nothing, for no name at all and for a file that is named twice.
    """
    names = [files] if isinstance(files, str | Path) else files
    found = [file for name in names for file in (_matches(str(name)) if _is_glob(name) else [name])]
    if not found:
        raise DataError(
            what="an empty list was given as the data set",
            expected="at least one row, a dict each, or at least one file",
            fix="look at what makes the list: a filter that keeps no row, or a search that finds no file",
        )
    seen = set()
    for file in found if len(found) > 1 else ():
        real = os.path.realpath(os.path.expanduser(file))  # noqa: PTH111
        if real in seen:
            what = "the file is named twice, so that each of its rows would stand twice in the data"
            raise DataError(what=what, where=str(file), fix="name it once; a glob names it, too")
        seen.add(real)
    return found


def read_files(files: Sequence[str | Path], read: Callable[[str | Path], Source]) -> Source:
    """Read the rows of all files, in their order. A place names the file. read: reads one file.

    Raises DataError for columns that are not in all of the files, or that hold what cannot stand in one column.
    """
    sources = _told_apart(files, [read(file) for file in files])
    first, names = sources[0], sources[0].table.column_names
    DataError.raise_for(
        [_of_other_columns(first, other) for other in sources[1:] if set(other.table.column_names) != set(names)]
    )
    starts = [0, *accumulate(source.table.num_rows for source in sources)]
    mixed = {name for source in sources for name in source.kinds}
    return Source(
        table=table_of_columns([_joined(name, sources) for name in names]),
        name=f"{first.name} and {len(sources) - 1} more",
        locate=_locator(sources, starts),
        faults={
            start + row: problem
            for start, source in zip(starts, sources, strict=False)
            for row, problem in source.faults.items()
        },
        kinds={name: pa.chunked_array([c for each in sources for c in _kinds(each, name).chunks]) for name in mixed},
        notes=tuple(dict.fromkeys(note for source in sources for note in source.notes)),
    )


def _is_glob(name: str | Path) -> bool:
    """Return whether this is a glob; an existing file whose name has such signs is not."""
    return bool(_GLOB & set(str(name))) and not os.path.lexists(os.path.expanduser(name))  # noqa: PTH111


def _matches(pattern: str) -> list[str | Path]:
    found: list[str | Path] = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))  # noqa: PTH111, PTH207
    if found:
        return found
    folder = Path(os.path.expanduser(pattern)).parent  # noqa: PTH111
    while not folder.is_dir():
        folder = folder.parent
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    listed = ", ".join(there[:_SHOWN]) + (f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else "")
    raise DataError(
        what=f"no file matches {pattern}",
        expected=f"a file in {folder}, which has {listed or 'none'}",
        fix="correct the pattern; put it in quotes, so that the shell hands it on as it is",
    )


def _told_apart(files: Sequence[str | Path], sources: list[Source]) -> list[Source]:
    """Give sources of the same name their folder's name, too, so that all names differ."""
    names = [source.name for source in sources]
    return [
        _named(source, Path(file).expanduser().absolute().parent.name) if names.count(source.name) > 1 else source
        for file, source in zip(files, sources, strict=True)
    ]


def _named(source: Source, folder: str) -> Source:
    return replace(source, name=f"{folder}/{source.name}", locate=lambda row: f"{folder}/{source.locate(row)}")


def _locator(sources: Sequence[Source], starts: Sequence[int]) -> Callable[[int], str]:
    def locate(row: int) -> str:
        number = bisect_right(starts, row) - 1
        return sources[number].locate(row - starts[number])

    return locate


def _of_other_columns(first: Source, other: Source) -> Problem:
    ours, theirs = first.table.column_names, other.table.column_names
    lacking = [name for name in ours if name not in theirs]
    more = [name for name in theirs if name not in ours]
    parts = [f"no column {listed_columns(lacking)}"] if lacking else []
    parts += [f"a column {listed_columns(more)} of its own"] if more else []
    return Problem(
        what=f"the file has {' and '.join(parts)}, otherwise than {first.name}",
        where=other.name,
        expected=f"the columns of {first.name}: {listed_columns(ours)}",
        fix="name the columns alike in all files, or take out those that are not in all",
    )


def _joined(name: str, sources: Sequence[Source]) -> tuple[pa.Field, pa.ChunkedArray]:
    """Join a column of all files. Where their types differ, it is text, as each file alone would write it."""
    fields = [source.table.schema.field(name) for source in sources]
    field = next((each for each in fields if problem_of(each)), fields[0])
    columns = [source.table[name] for source in sources]
    forms = {
        (each.type, nested_word(each)): source.name
        for each, source in zip(fields, sources, strict=True)
        if not pa.types.is_null(each.type)
    }
    types = {kind for kind, _ in forms}
    if len({word for _, word in forms}) > 1 or (len(types) > 1 and any(map(pa.types.is_nested, types))):
        first, other, *_ = forms.values()
        what = f"column `{name}` holds lists or objects in one form here and in another in {first}"
        field = with_problem(
            pa.field(name, pa.string()), Problem(what=what, where=other, fix="write all files in one format")
        )
    if len(types) > 1:
        kind = pa.large_string() if pa.large_string() in types else pa.string()
        field, columns = field.with_type(kind), [_as_text(column, kind) for column in columns]
    elif types:
        field, columns = field.with_type(*types), [column.cast(*types) for column in columns]
    return field, pa.chunked_array([chunk for column in columns for chunk in column.chunks], type=field.type)


def _as_text(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type):
        return column.cast(kind)
    present = column.is_valid().to_pylist()
    texts = [text if is_there else None for text, is_there in zip(cell_texts(column), present, strict=True)]
    return pa.chunked_array([pa.array(texts, type=kind)])


def _kinds(source: Source, name: str) -> pa.ChunkedArray:
    """Return the kind of each cell, as a mixed column has them."""
    if name in source.kinds:
        return source.kinds[name]
    column = source.table[name]
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    word = "true or false" if pa.types.is_boolean(column.type) else "a number" if is_number else "text"
    return pc.if_else(column.is_valid(), word, pa.scalar(None, pa.string()))
