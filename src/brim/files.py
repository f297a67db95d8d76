"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from brim.errors import Problem, WriteError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path` once it is written and synced.

    Whatever stood there stays as it was if the writing fails.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` to fill; it takes the place of `path` once all its files are synced."""
    temporary = path.with_name(f".{path.name}.tmp")
    make_folder(path.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    finish_replacing(path)
    temporary.mkdir()
    try:
        yield temporary
        _open_to_readers(temporary)
        for entry in sorted(temporary.rglob("*")):
            sync(entry)
        sync(temporary)
        if path.exists():
            _replace_folder(temporary, path)
        else:
            temporary.rename(path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that what is synced in it cannot lose its place."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that no part of it is ever seen under its name."""
    shutil.rmtree(_aside(path), ignore_errors=True)
    path.rename(_aside(path))
    shutil.rmtree(_aside(path))


def remove_unfinished(folder: Path) -> None:
    """Delete the folders that killed writes and deletions left in `folder`, under names of this module's own."""
    for pattern in (".*.tmp", ".*.old"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def is_half_replaced(path: Path) -> bool:
    """Whether a kill struck between the two renames that replace a folder: the old one is whole, and aside."""
    return _aside(path).exists() and not path.exists()


def finish_replacing(path: Path) -> None:
    """Put back, or take away, the old folder that a kill left aside."""
    if is_half_replaced(path):
        _aside(path).rename(path)
    else:
        shutil.rmtree(_aside(path), ignore_errors=True)


def sync(path: Path) -> None:
    """Return once the file's content, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str, where: Path) -> Iterator[None]:
    """Raise WriteError, with `what` could not be written and where, for the system's own error."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(
            Problem(
                what=f"{what} could not be written: {reason}",
                where=str(where),
                fix="make room or make the folder writable, then continue with --resume",
            )
        ) from error


def _open_to_readers(folder: Path) -> None:
    """Let those read the files who may read a new file here: safetensors writes for the owner's eyes alone."""
    readable = folder.stat().st_mode & 0o666
    with suppress(OSError):  # not every file system has modes that can be set
        for entry in folder.rglob("*"):
            if entry.is_file():
                entry.chmod(readable)


def _replace_folder(temporary: Path, path: Path) -> None:
    """A folder cannot be renamed over another: the old one steps aside first and goes last."""
    path.rename(_aside(path))
    temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
