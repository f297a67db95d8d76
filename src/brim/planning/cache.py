"""Small JSON files on disk under names that are digests of what they depend on. The oldest go when there are many.

A checksum in each says whether it is what was written: a number that was damaged would be believed otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from brim.cache_folder import cache_folder
from brim.errors import WriteError
from brim.files import make_folder, write_text, writing

__all__ = ["Cache", "cache_folder", "digest", "forget_oldest", "sealed"]

_MOST_BYTES = 64 * 2**20  # of one kind; an entry has a few kilobytes, so that thousands stay


class Cache:
    """Entries of one kind. Nothing here can fail a run: `note` says what was wrong, if anything was."""

    def __init__(self, folder: Path, kind: str, *, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder / kind
        self._most_bytes = most_bytes
        self.note: str | None = None

    def read(self, name: str) -> Any:
        """The entry; None where there is none, or a damaged one."""
        path = self._path(name)
        try:
            value = _opened(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note = f"{path} cannot be read, and is not used: {error.strerror}"
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            self.refuse(name)
            return None
        with suppress(OSError):  # a folder that only others may write to
            os.utime(path)  # what is used is not the oldest
        return value

    def refuse(self, name: str) -> None:
        """The entry is not what it should be; it is written anew."""
        self.note = f"{self._path(name)} is damaged, and is not used"

    def write(self, name: str, value: Any) -> None:
        """Keep an entry, whole or not at all; what was used longest ago goes where there is too much."""
        try:
            with writing("an entry of the cache", self._path(name)):
                make_folder(self._folder)
                write_text(self._path(name), sealed(json.dumps(value)))
        except WriteError as error:
            self.note = f"nothing is kept for later runs: {error.problems[0].what} ({self._folder})"
            return
        forget_oldest(self._folder, most_bytes=self._most_bytes)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def sealed(value: str) -> str:
    """The content of a file for a value that is JSON."""
    return f'{{"sha256": "{_checksum(value)}", "value": {value}}}'


def _opened(content: str) -> Any:
    saved = json.loads(content)
    if saved["sha256"] != _checksum(json.dumps(saved["value"])):
        raise ValueError("the checksum differs")
    return saved["value"]


def _checksum(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def digest(facts: Mapping[str, Any]) -> str:
    """One name for equal facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def forget_oldest(folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
    """Remove the entries of a folder that were used longest ago, until the others take no more than this."""
    entries = sorted(_entries(folder), reverse=True)
    total_bytes = 0
    for _, path, num_bytes in entries:
        total_bytes += num_bytes
        if total_bytes > most_bytes:
            with suppress(OSError):  # another process was quicker
                path.unlink()


def _entries(folder: Path) -> Iterator[tuple[int, Path, int]]:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            status = path.stat()
            yield status.st_mtime_ns, path, status.st_size
