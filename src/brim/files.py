"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 1 << 20


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path` once it is written and synced.

    Whatever stood there stays as it was if the writing fails.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` to fill; it takes the place of `path` once all its files are synced."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    _finish_replacing(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            _sync(entry)
        _sync(temporary)
        if path.exists():
            _replace_folder(temporary, path)
        else:
            temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _replace_folder(temporary: Path, path: Path) -> None:
    """A folder cannot be renamed over another: the old one steps aside first and goes last."""
    path.rename(_aside(path))
    temporary.rename(path)
    shutil.rmtree(_aside(path))


def _finish_replacing(path: Path) -> None:
    """Put back, or take away, the old folder that a kill left aside."""
    if _aside(path).exists():
        if path.exists():
            shutil.rmtree(_aside(path))
        else:
            _aside(path).rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
