"""Write files and folders that appear whole or not at all, and keep digests, small caches and secrets safe.

A manifest holds the digest of every file of a folder, by which a changed or missing one is known. The cache folder
holds what brim can make again: copies of data, embeddings, what traces found, plans. Each kind has a budget in bytes:
what was used longest ago goes when it is exceeded. Small JSON files lie in it under names that are digests of what they
depend on. A checksum in each says whether it is what was written: a number that was damaged would be believed
otherwise. The environment's secrets are found by the names of their variables: they must not stand in any file or
message.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from brim.errors import WriteError

MANIFEST = "manifest.json"


_CHUNK_BYTES = 1 << 20


def write_manifest(folder: Path) -> None:
    """Write the folder's manifest: SHA-256 by path, for all files in it and below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    # No line break at the end, so that a manifest that lost its last byte is no longer valid JSON.
    write_text(folder / MANIFEST, json.dumps(digests, indent=1))


def verified(folder: Path) -> list[str]:
    """Return the paths in the folder's manifest, after checking that each file is unchanged.

    Raises OSError when a file or the manifest is missing; ValueError, with the names, when a file was changed, when the
    manifest is not valid, or when it names a path outside the folder.
    """
    _require_regular(folder / MANIFEST)
    try:
        digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except RecursionError:
        digests = None
    if not isinstance(digests, dict):
        raise ValueError(f"{MANIFEST} is not a list of files and digests")
    strange = [name for name in digests if not _is_inside(name)]
    if strange:
        raise ValueError(f"{MANIFEST} names paths outside the folder: {', '.join(strange)}")
    for name in digests:
        _require_regular(folder / name)
    changed = [name for name, digest in digests.items() if sha256(folder / name) != digest]
    if changed:
        raise ValueError(f"{', '.join(changed)} changed since it was written")
    return list(digests)


def _require_regular(path: Path) -> None:
    """Raise ValueError for links, pipes and devices, which brim never writes; reading them might never end."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path.name} is not a regular file")


def sha256(path: Path) -> str:
    """Return the digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


@cache
def source_digest(packages: tuple[str, ...]) -> str:
    """Return a digest of the source of brim's packages, such as "memory": results of a trace depend on it."""
    total = hashlib.sha256()
    for package in packages:
        sources = sorted((Path(__file__).parent / package).rglob("*.py"))
        assert sources, f"brim has no package {package}"
        for path in sources:
            total.update(path.name.encode())
            total.update(path.read_bytes())
    return total.hexdigest()[:32]


_MOST_BYTES = 64 * 2**20  # for one kind; an entry has a few kilobytes, so thousands fit


class Cache:
    """Keep entries of one kind. Nothing here can fail a run: `note` says what went wrong, if anything did."""

    def __init__(self, folder: Path, kind: str, *, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder / kind
        self._most_bytes = most_bytes
        self.note: str | None = None

    def read(self, name: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return the entry; None if there is none, or if it is damaged, and so will be written again.

        parse: of the value that was written; what it raises for another one says that the entry is damaged.
        """
        path = self._path(name)
        try:
            value = parse(_opened(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note = f"{path} cannot be read, and is not used: {error.strerror}"
            return None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self.note = f"{path} is damaged, and is not used"
            return None
        mark_used(path)
        return value

    def write(self, name: str, value: Any) -> None:
        """Write an entry, whole or not at all; delete the least recently used ones if there are too many."""
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
    """Return the content of a file for a value in JSON, with its checksum."""
    return f'{{"sha256": "{_checksum(value)}", "value": {value}}}'


def _opened(content: str) -> Any:
    saved = json.loads(content)
    if saved["sha256"] != _checksum(json.dumps(saved["value"])):
        raise ValueError("the checksum differs")
    return saved["value"]


def _checksum(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def digest(facts: Mapping[str, Any]) -> str:
    """Return a name that is the same for equal facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def mark_used(path: Path) -> None:
    """Make an entry of the cache the newest."""
    with suppress(OSError):  # a folder that only others may write to
        os.utime(path)


_ABANDONED_S = 24 * 3600


def forget_oldest(folder: Path, pattern: str = "*.json", *, most_bytes: int = _MOST_BYTES) -> None:
    """Remove the entries of a folder that were used longest ago, until the others take no more than this.

    One that alone takes more goes, too, and no other goes for it. pattern: of the entries' names; an entry is a file,
    or a folder with a manifest and all that is in it. What killed writes left goes after a day. What else lies there is
    not brim's.
    """
    for unfinished in (each for ending in ("tmp", "old") for each in folder.glob(f".{pattern}.{ending}")):
        with suppress(OSError, ValueError):  # another process was quicker
            if time.time() - max(each.stat().st_mtime for each in (unfinished, *unfinished.rglob("*"))) > _ABANDONED_S:
                shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
    total_bytes = 0
    for _, path, num_bytes in sorted(_entries(folder, pattern), reverse=True):
        if total_bytes + num_bytes <= most_bytes:
            total_bytes += num_bytes
        else:
            with suppress(OSError):  # another process was quicker
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _entries(folder: Path, pattern: str) -> Iterator[tuple[int, Path, int]]:
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.is_dir() and not (path / MANIFEST).is_file():
                continue
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            yield path.stat().st_mtime_ns, path, sum(each.stat().st_size for each in files)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove the files and folders that a process which is dead left: who writes one, or into one, holds a lock on it.

    An empty folder stays: it may be a process's that is about to lock it.
    """
    for path in folder.glob(pattern):
        with suppress(OSError), _opened_to_lock(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.is_dir():
                path.unlink()
            elif any(path.iterdir()):
                shutil.rmtree(path)


@contextmanager
def scratch_folder(prefix: str, *, within: Path | None = None) -> Iterator[Path]:
    """Yield a new folder of temporary files, which goes with the block; those that killed processes left go before.

    within: a folder; default: the system's for temporary files.
    """
    within = Path(tempfile.gettempdir()) if within is None else within
    remove_abandoned(within, f"{prefix}*")
    temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True)  # a child may write
    with temporary as name, _opened_to_lock(Path(name)) as descriptor:
        with suppress(OSError):  # a file system without locks, where nothing is taken for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Path(name)


@contextmanager
def _opened_to_lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return BRIM_CACHE_DIR, else brim's folder in the user's cache (XDG_CACHE_HOME). It need not exist yet."""
    own = os.environ.get("BRIM_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "brim"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` once it is written and synced.

    If the writing fails, `path` stays as it was.
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
    """Yield a temporary folder beside `path` to fill; it replaces `path` once all its files are synced."""
    temporary = path.with_name(f".{path.name}.tmp")
    make_folder(path.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    finish_replacing(path)
    temporary.mkdir()
    try:
        yield temporary
        _open_to_readers(temporary)
        for entry in (*sorted(temporary.rglob("*")), temporary):
            sync(entry)
        if path.exists():  # a folder cannot be renamed over another: the old one is set aside first and deleted last
            path.rename(_aside(path))
        temporary.rename(path)
        sync(path.parent)
        if _aside(path).exists():
            shutil.rmtree(_aside(path))
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
    """Return whether a kill came between the two renames that replace a folder: the old one is whole, but set aside."""
    return _aside(path).exists() and not path.exists()


def finish_replacing(path: Path) -> None:
    """Put back, or delete, the old folder that was set aside when the process was killed."""
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
    """Turn an OSError into a WriteError that says what could not be written, and where."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(
            what=f"{what} could not be written: {reason}",
            where=str(where),
            fix="make room or make the folder writable, then continue with --resume",
        ) from error


def _open_to_readers(folder: Path) -> None:
    """Give the files the read permissions of their folder: safetensors makes files that only the owner can read."""
    readable = folder.stat().st_mode & 0o666
    with suppress(OSError):  # not every file system has modes that can be set
        for entry in folder.rglob("*"):
            if entry.is_file():
                entry.chmod(readable)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|(ACCESS|SECRET|PRIVATE)_KEY)$", re.IGNORECASE)


_SHORTEST = 12  # characters; a shorter value may appear in any text by chance


def secrets_of_environment() -> list[str]:
    """Return the secrets' values, as they are and as they are written in URLs, the longest first."""
    values = {value for name, value in os.environ.items() if len(value) >= _SHORTEST and _NAMES.search(name)}
    return sorted(values | {quote(value, safe="") for value in values}, key=len, reverse=True)
