"""Keep a stream of record batches as one table: in memory while small, memory-mapped from disk beyond that.

Chosen rows of a table are read a block at a time, so that a large one is never in memory whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.errors import OutputError, Problem
from brim.storage import cache_folder

BATCH_ROWS = 1024


Keys = npt.NDArray[np.int64]


def blocks(table: pa.Table, keys: Keys) -> Iterator[tuple[Keys, pa.Table]]:
    """These rows (ascending) in batches, each with its keys."""
    for start in range(0, table.num_rows, BATCH_ROWS):
        low, high = np.searchsorted(keys, [start, start + BATCH_ROWS])
        if low < high:
            yield keys[low:high], table.slice(start, BATCH_ROWS).combine_chunks().take(pa.array(keys[low:high] - start))


SPILL_BYTES = 64 * 2**20  # Arrow data up to this size stays in memory


_READER_VERSION = 5  # part of a kept file's name: raise it when a reader's result changes


Batches = Iterable[pa.RecordBatch]


def gather(batches: Batches, *, schema: pa.Schema, keep_as: Path | None = None) -> pa.Table:
    """All batches as one table; beyond SPILL_BYTES they stream into an Arrow file, which is memory-mapped.

    keep_as: where that file stays for the next run. Without it the file has no name and goes when the table goes.
    Raises OutputError when the disk does not take it.
    """
    stream = iter(batches)
    held: list[pa.RecordBatch] = []
    num_bytes = 0
    for batch in stream:
        held.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > SPILL_BYTES:
            return _to_disk(_first_held_then_rest(held, stream), schema=schema, keep_as=keep_as)
    return pa.Table.from_batches(held, schema=schema)


def kept_or(read: Callable[[Path], pa.Table], source: Path) -> pa.Table:
    """The table that an earlier run kept for this very file (path, size, time of change), else `read(keep_as)`."""
    keep_as = _kept_path(source)
    if keep_as.exists():
        try:
            return open_mapped(keep_as)
        except (pa.ArrowInvalid, OSError):
            keep_as.unlink(missing_ok=True)  # cut short by a crash of the machine: it is only a copy
    return read(keep_as)


def open_mapped(path: Path) -> pa.Table:
    """An Arrow file as a table whose buffers stay on disk."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _kept_path(source: Path) -> Path:
    status = source.stat()
    name = hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()
    return cache_folder() / f"{name}-{status.st_size}-{status.st_mtime_ns}-{_READER_VERSION}.arrow"


def _first_held_then_rest(held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held.reverse()
    while held:
        yield held.pop()  # popped, so that its memory is free once it is written
    yield from rest


def _to_disk(batches: Iterator[pa.RecordBatch], *, schema: pa.Schema, keep_as: Path | None) -> pa.Table:
    folder = _writable_folder()
    handle, name = tempfile.mkstemp(dir=folder, prefix="spill-", suffix=".part")
    part = Path(name)
    try:
        with _Disk(handle, folder) as disk:
            with pa.ipc.new_file(disk, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            disk.flush()
            if keep_as is not None:
                os.fsync(handle)
        if keep_as is not None and keep_as.parent == folder:
            _forget_older(keep_as)
            part.replace(keep_as)
            return open_mapped(keep_as)
        return open_mapped(part)
    finally:
        # The mapping outlives the name. Where a mapped file cannot lose its name (Windows) it stays behind.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            part.unlink()


def _forget_older(keep_as: Path) -> None:
    """Remove what was kept of earlier states of the same source file."""
    for older in keep_as.parent.glob(f"{keep_as.name.split('-')[0]}-*.arrow"):
        with contextlib.suppress(OSError):
            older.unlink()


def _writable_folder() -> Path:
    """brim's cache folder, or the system's temporary folder where that cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


class _Disk:
    """A file for Arrow's writer that tells a full disk as what it is, apart from failures to read the source."""

    def __init__(self, handle: int, folder: Path) -> None:
        self._file = os.fdopen(handle, "wb")
        self._folder = folder

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the rest of what could not be written, once more
            self._file.close()

    def write(self, data: Any) -> int:
        with self._told():
            return self._file.write(data)

    def flush(self) -> None:
        with self._told():
            self._file.flush()

    def close(self) -> None:
        """For Arrow, which closes what it writes to; this file closes with its own block."""

    @property
    def closed(self) -> bool:
        return self._file.closed

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                Problem(
                    what=f"the memory-mapped copy of the data cannot be written: {error.strerror}",
                    where=str(self._folder),
                    fix="make room there, or set BRIM_CACHE_DIR to a folder on a larger disk",
                )
            ) from None
