"""Several files as one data set: their names and globs, and their rows one after the other."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from brim.data.as_text import mixed_field, nested_word, problem_of
from brim.data.prompt import cell_texts
from brim.data.source import Source
from brim.errors import DataError, Problem

Files: TypeAlias = "str | Path | Sequence[str | Path]"

_GLOB = frozenset("*?[")
_SHOWN = 5  # names in a message


def is_files(data: object) -> bool:
    """Whether these are the names of one or more files."""
    return isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(name, str | Path) for name in data)
    )


def absolute_files(files: Files) -> str | tuple[str, ...]:
    """The names as they are from any folder. One that leads nowhere stays so, to be told when it is read."""
    names = [files] if isinstance(files, str | Path) else files
    # pathlib's own raise for a loop of links and for the home of nobody.
    paths = tuple(os.path.realpath(os.path.expanduser(name)) for name in names)  # noqa: PTH111
    return paths[0] if len(paths) == 1 else paths


def named_files(files: Files) -> list[str | Path]:
    """The files by their names, those of a glob in alphabetical order.

    Raises DataError for a glob that matches nothing, for no name at all and for a file that is named twice.
    """
    names = [files] if isinstance(files, str | Path) else files
    found = [file for name in names for file in (_matches(str(name)) if _is_glob(name) else [name])]
    if not found:
        raise DataError(Problem(what="an empty list was given as the data set", expected="at least one file"))
    seen = set()
    for file in found if len(found) > 1 else ():
        real = os.path.realpath(os.path.expanduser(file))  # noqa: PTH111
        if real in seen:
            what = "the file is named twice, so that each of its rows would stand twice in the data"
            raise DataError(Problem(what=what, where=str(file), fix="name it once; a glob names it, too"))
        seen.add(real)
    return found


def read_files(files: Sequence[str | Path], read: Callable[[str | Path], Source]) -> Source:
    """The rows of all files, in their order. A place names the file. read: one of them.

    Raises DataError for columns that are not in all of the files, or that hold what cannot stand in one column.
    """
    sources = _told_apart(files, [read(file) for file in files])
    first, names = sources[0], sources[0].table.column_names
    problems = [_of_other_columns(first, other) for other in sources[1:] if set(other.table.column_names) != set(names)]
    if problems:
        raise DataError(*problems)
    starts = [0, *accumulate(source.table.num_rows for source in sources)]
    mixed = {name for source in sources for name in source.kinds}
    columns = {name: _joined(name, sources) for name in names}
    return Source(
        table=pa.Table.from_arrays(
            [array for _, array in columns.values()], schema=pa.schema([field for field, _ in columns.values()])
        ),
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
    """A file whose name has such signs is no glob."""
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
        Problem(
            what=f"no file matches {pattern}",
            expected=f"a file in {folder}, which has {listed or 'none'}",
            fix="correct the pattern; put it in quotes, so that the shell hands it on as it is",
        )
    )


def _told_apart(files: Sequence[str | Path], sources: list[Source]) -> list[Source]:
    """Sources whose names differ: those that are called alike by their folders, too."""
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
    parts = [f"no column {_listed(lacking)}"] if lacking else []
    parts += [f"a column {_listed(more)} of its own"] if more else []
    return Problem(
        what=f"the file has {' and '.join(parts)}, otherwise than {first.name}",
        where=other.name,
        expected=f"the columns of {first.name}: {_listed(ours)}",
        fix="name the columns alike in all files, or take out those that are not in all",
    )


def _listed(names: Iterable[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown[: 4 * _SHOWN]) + (f" and {len(shown) - 4 * _SHOWN} more" if len(shown) > 4 * _SHOWN else "")


def _joined(name: str, sources: Sequence[Source]) -> tuple[pa.Field, pa.ChunkedArray]:
    """A column of all files. Where they have it in different types, it is text, as each of them has it."""
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
        field = mixed_field(name, Problem(what=what, where=other, fix="write all files in one format"))
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
    """Of each cell, as a mixed column has them."""
    if name in source.kinds:
        return source.kinds[name]
    column = source.table[name]
    kind = column.type
    word = "text"
    if pa.types.is_boolean(kind):
        word = "true or false"
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        word = "a number"
    present: Mapping[bool, str | None] = {True: word, False: None}
    return pa.chunked_array([pa.array([present[valid] for valid in column.is_valid().to_pylist()], type=pa.string())])
