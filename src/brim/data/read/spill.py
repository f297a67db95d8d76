"""Keep a stream of record batches as one table: in memory while small, memory-mapped from disk beyond that.

Chosen rows of a table are read a block at a time, so that a large one is never in memory whole. The copy of a large
file stays in the cache for later runs, within a budget; beside the table it holds why rows cannot be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.errors import OutputError, Problem
from brim.storage import cache_folder, forget_oldest, mark_used, remove_abandoned

BATCH_ROWS = 1024


Keys = npt.NDArray[np.int64]


BLOCK_BYTES = 2**20  # rows of this size at most are read together: a tokenizer takes a hundred times as much


def blocks(table: pa.Table, keys: Keys, *, row_bytes: int = 0) -> Iterator[tuple[Keys, pa.Table]]:
    """Give these rows (ascending) in batches, each with its keys.

    row_bytes: what is made of a row beside its cells, such as a template's text.
    """
    start = 0
    while start < table.num_rows:
        num_rows = BATCH_ROWS
        while num_rows > 1 and table.slice(start, num_rows).nbytes + num_rows * row_bytes > BLOCK_BYTES:
            num_rows //= 2
        low, high = np.searchsorted(keys, [start, start + num_rows])
        if low < high:
            yield keys[low:high], table.slice(start, num_rows).combine_chunks().take(pa.array(keys[low:high] - start))
        start += num_rows


SPILL_BYTES = 64 * 2**20  # Arrow data up to this size stays in memory


MOST_KEPT_BYTES = 8 * 2**30  # of all copies of data sets in the cache


_READER_VERSION = 6  # part of a kept file's name: raise it when a reader's result changes


_FAULTS = "brim.faults"  # of the last batch of a kept file, which has no rows


Faults = dict[int, Problem]  # why rows cannot be read, by their numbers; without a place


def gather(
    batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, keep_as: Path | None = None, faults: Faults | None = None
) -> pa.Table:
    """Return all batches as one table; beyond SPILL_BYTES they stream into an Arrow file, which is memory-mapped.

    keep_as: where that file stays for the next run, with the faults, which are complete once all batches are drawn.
    Without it the file has no name and goes when the table goes.
    Raises OutputError when the disk does not take it.
    """
    stream = iter(batches)
    held: list[pa.RecordBatch] = []
    num_bytes = 0
    for batch in stream:
        held.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > SPILL_BYTES:
            return _to_disk(_first_held_then_rest(held, stream), schema=schema, keep_as=keep_as, faults=faults or {})
    return pa.Table.from_batches(held, schema=schema)


def kept_or(read: Callable[[Path, Faults], pa.Table], source: Path) -> tuple[pa.Table, Faults]:
    """Return the table of a file and why rows of it cannot be read.

    They are what an earlier run kept of this very file (path, size, time of change), else `read(keep_as, faults)`,
    which fills the faults.
    """
    keep_as = _kept_path(source)
    if keep_as.exists():
        try:
            with pa.memory_map(str(keep_as)) as file:
                kept = _opened(file)
            mark_used(keep_as)
            return kept
        except (pa.ArrowInvalid, OSError, LookupError):
            keep_as.unlink(missing_ok=True)  # cut short by a crash of the machine: it is only a copy
    faults: Faults = {}
    return read(keep_as, faults), faults


def _opened(file: Any) -> tuple[pa.Table, Faults]:
    reader = pa.ipc.open_file(file)
    metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1).custom_metadata
    problems = json.loads(metadata[_FAULTS.encode()])
    return reader.read_all(), {int(row): Problem(**problem) for row, problem in problems.items()}


def _kept_path(source: Path) -> Path:
    status = source.stat()
    name = hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()
    return cache_folder() / f"{name}-{status.st_size}-{status.st_mtime_ns}-{_READER_VERSION}.arrow"


def _first_held_then_rest(held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held.reverse()
    while held:
        yield held.pop()  # popped, so that its memory is free once it is written
    yield from rest


def _to_disk(batches: Iterator[pa.RecordBatch], *, schema: pa.Schema, keep_as: Path | None, faults: Faults) -> pa.Table:
    folder = _writable_folder()
    remove_abandoned(folder, "spill-*.part")
    handle, part = _locked_part(folder)
    try:
        with _Disk(handle, folder) as disk:
            with pa.ipc.new_file(disk, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                problems = json.dumps({row: asdict(problem) for row, problem in faults.items()})
                nothing = [pa.nulls(0, each.type) for each in schema]
                writer.write_batch(pa.RecordBatch.from_arrays(nothing, schema=schema), {_FAULTS: problems})
            disk.flush()
            if keep_as is not None and keep_as.parent == folder:
                os.fsync(handle)
                _keep(part, keep_as)
            mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
            return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()
    finally:
        part.unlink(missing_ok=True)  # the mapping outlives the name


def _locked_part(folder: Path) -> tuple[int, Path]:
    """Create a file that is locked, so that no other process takes it for abandoned.

    One that another process has taken for that before it was locked has no name any more: then the next is created.
    """
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix="spill-", suffix=".part")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, Path(name)
        except BaseException:  # a file system without locks, or Ctrl-C: it is not left behind
            os.close(handle)
            Path(name).unlink(missing_ok=True)
            raise
        os.close(handle)


def _keep(part: Path, keep_as: Path) -> None:
    """Give a copy its name, in place of those of earlier states of the same source file, and of the oldest ones."""
    for older in keep_as.parent.glob(f"{keep_as.name.split('-')[0]}-*.arrow"):
        with contextlib.suppress(OSError):
            older.unlink()
    part.replace(keep_as)
    forget_oldest(keep_as.parent, "[0-9a-f]" * 16 + "-*-*-*.arrow", most_bytes=MOST_KEPT_BYTES)


def _writable_folder() -> Path:
    """Return brim's cache folder, or the system's temporary folder where that cannot be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


class _Disk:
    """Wrap a file for Arrow's writer, so that a full disk is not taken for a failure to read the source."""

    def __init__(self, handle: int, folder: Path) -> None:
        self._file = os.fdopen(handle, "wb+")  # readable, too, since it is mapped afterwards
        self._folder = folder

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the rest of what could not be written, once more
            self._file.close()

    def write(self, data: Any) -> int:
        with self._explained():
            return self._file.write(data)

    def flush(self) -> None:
        with self._explained():
            self._file.flush()

    def close(self) -> None:
        """Do nothing when Arrow closes what it writes to; this file closes with its own block."""

    @property
    def closed(self) -> bool:
        return self._file.closed

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                what=f"the memory-mapped copy of the data cannot be written: {error.strerror}",
                where=str(self._folder),
                fix="make room there, or set BRIM_CACHE_DIR to a folder on a larger disk",
            ) from None
