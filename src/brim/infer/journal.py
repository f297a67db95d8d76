"""Keep what a job has done so far in a file that only grows, of records that are known to be whole.

A record holds a response or its score as bytes, and prompts are known by a hash of their tokens. A job that nobody
will resume holds its records in memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.errors import OutputError
from brim.storage import writing


class DoneRows:
    """Look up rows by their position in records by their keys.

    keys: of the rows. prompts: hashes of the prompts that the rows have now. A record of the same key for another
    prompt does not count: `changed` are the positions of such rows.
    """

    def __init__(self, records: Records, *, keys: UInts, prompts: UInts) -> None:
        self._records, self._keys, self._prompts = records, keys, prompts
        self._numbers = records.find(keys)
        found = np.flatnonzero(self._numbers >= 0)
        self.num_found = len(found)
        self.changed = found[records.prompts(self._numbers[found]) != prompts[found]]
        self._numbers[self.changed] = -1

    @property
    def num_done(self) -> int:
        return int(np.count_nonzero(self._numbers >= 0))

    def to_do(self) -> NDArray[np.intp]:
        """Return positions of the rows that are not done yet."""
        return np.flatnonzero(self._numbers < 0)

    def add(self, positions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Record that these rows are done."""
        first, places = len(self._records), np.asarray(positions, dtype=np.intp)
        rows = zip(self._keys[places].tolist(), self._prompts[places].tolist(), bodies, strict=True)
        self._records.append([Record(key=key, prompt=prompt, body=body) for key, prompt, body in rows])
        self._numbers[places] = np.arange(first, first + len(places))

    def body(self, position: int) -> bytes:
        """Return what was done for a row that is done."""
        return self._records.body(int(self._numbers[position]))


class HeldRecords:
    """Hold in memory what a Journal keeps on disk."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def __len__(self) -> int:
        return len(self._records)

    def append(self, records: Sequence[Record]) -> None:
        """Add records."""
        self._records += records

    def find(self, keys: UInts) -> NDArray[np.int64]:
        """Find the records that count for these keys, as numbers; -1 where there is none."""
        numbers = {record.key: number for number, record in enumerate(self._records)}
        return np.array([numbers.get(key, -1) for key in keys.tolist()], dtype=np.int64)

    def prompts(self, numbers: NDArray[np.int64]) -> UInts:
        """Return hashes of the prompts of these records."""
        return np.array([self._records[number].prompt for number in numbers.tolist()], dtype=np.uint64)

    def body(self, number: int) -> bytes:
        """Return the content of a record."""
        return self._records[number].body


# A kill loses nothing that was written, a failure of the machine what is younger than this. If each write were synced,
# a job of short answers would wait for the disk most of its time.
SYNC_EVERY_S = 2.0


_MAGIC = b"brimjnl1"


_RECORD_HEAD = struct.Struct("<IIQQ")  # bytes of the body, checksum, key, prompt


_CHECKED = struct.Struct("<IQQ")  # what of the head the checksum covers, before the body


_READ_BYTES = 1 << 20


_MOST_BODY_BYTES = 1 << 28  # a longer one is a damaged head


UInts = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Hold what was done for one row."""

    key: int  # of the row, 64 bits
    prompt: int  # what it was done for: a hash of the prompt's tokens, 64 bits
    body: bytes


class Journal:
    """Keep records in a file, by key; of two with one key, the later counts.

    Opening cuts off what is not whole at the end: the record that a kill, or a full disk, has broken off. Writes that
    fail raise WriteError and leave the records before them as they are.
    """

    EMPTY_BYTES = len(_MAGIC)  # of a journal without records

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys, self._prompts, self._places = array("Q"), array("Q"), array("Q")
        with writing("the journal", path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._end = self._whole_records()
            self.num_torn_bytes = os.fstat(self._file).st_size - self._end
            os.ftruncate(self._file, self._end)
            if not self._end:
                self._write(_MAGIC)
        self._synced_s = time.monotonic()
        self._by_key: tuple[UInts, NDArray[np.intp]] | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Count the records, those included that a later one has replaced."""
        return len(self._keys)

    def append(self, records: Sequence[Record]) -> None:
        """Add records, in one write, so that they are all there or, after a kill, some at the end are not."""
        places, parts, end = [], [], self._end
        for record in records:
            places.append(end)
            checksum = _checksum(record.key, record.prompt, record.body)
            parts.append(_RECORD_HEAD.pack(len(record.body), checksum, record.key, record.prompt) + record.body)
            end += len(parts[-1])
        with writing("the journal", self._path):
            try:
                self._write(b"".join(parts))
            except OSError:
                os.ftruncate(self._file, self._end)
                raise
            if time.monotonic() - self._synced_s > SYNC_EVERY_S:
                os.fsync(self._file)
                self._synced_s = time.monotonic()
        self._keys.extend(record.key for record in records)
        self._prompts.extend(record.prompt for record in records)
        self._places.extend(places)
        self._by_key = None

    def find(self, keys: UInts) -> NDArray[np.int64]:
        """Find the records that count for these keys, as numbers; -1 where there is none."""
        known, numbers = self._index()
        if not len(known):
            return np.full(len(keys), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[places] == keys, numbers[places], -1).astype(np.int64)

    def prompts(self, numbers: NDArray[np.int64]) -> UInts:
        """Return hashes of the prompts of these records."""
        return np.frombuffer(self._prompts, dtype=np.uint64)[numbers] if len(numbers) else np.zeros(0, np.uint64)

    def keys(self) -> UInts:
        """Return each key once, in ascending order."""
        return self._index()[0]

    def body(self, number: int) -> bytes:
        """Read the content of a record. Raises OutputError where the file has changed since it was opened."""
        place = self._places[number]
        length, checksum, key, prompt = _RECORD_HEAD.unpack(os.pread(self._file, _RECORD_HEAD.size, place))
        body = os.pread(self._file, length, place + _RECORD_HEAD.size)
        if checksum != _checksum(key, prompt, body):
            raise OutputError(what="the journal was changed by others", where=str(self._path))
        return body

    def close(self) -> None:
        """Sync and close; a second call does nothing."""
        if self._file < 0:
            return
        descriptor, self._file = self._file, -1
        try:
            with writing("the journal", self._path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _whole_records(self) -> int:
        """Note all records that are whole. Return where the last one ends; 0 where not even the beginning is there.

        Raises OutputError for a file of another kind.
        """
        with os.fdopen(os.dup(self._file), "rb", buffering=_READ_BYTES) as reader:
            reader.seek(0)
            magic = reader.read(len(_MAGIC))
            if not _MAGIC.startswith(magic):
                raise OutputError(
                    what="this file is not the journal of a prediction, or its beginning is damaged",
                    where=str(self._path),
                    fix="restore it; or remove it, and what it held is made again",
                )
            if magic != _MAGIC:
                return 0
            end = len(_MAGIC)
            while len(head := reader.read(_RECORD_HEAD.size)) == _RECORD_HEAD.size:
                length, checksum, key, prompt = _RECORD_HEAD.unpack(head)
                body = reader.read(length) if length <= _MOST_BODY_BYTES else b""
                if len(body) != length or checksum != _checksum(key, prompt, body):
                    break
                self._keys.append(key)
                self._prompts.append(prompt)
                self._places.append(end)
                end += _RECORD_HEAD.size + length
            return end

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._end += len(data)

    def _index(self) -> tuple[UInts, NDArray[np.intp]]:
        """Return keys in ascending order, and the number of the last record of each."""
        if self._by_key is None:
            # A copy: an array cannot grow while numpy looks at it.
            every = np.array(self._keys, dtype=np.uint64)
            known, from_the_end = np.unique(every[::-1], return_index=True)
            self._by_key = known, len(every) - 1 - from_the_end
        return self._by_key


Records: TypeAlias = Journal | HeldRecords


def _checksum(key: int, prompt: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_CHECKED.pack(len(body), key, prompt)))


_SCORE = struct.Struct("<d")


def score_bytes(log_probability: float) -> bytes:
    """Pack a score for `score_of`."""
    return _SCORE.pack(log_probability)


def score_of(body: bytes) -> float:
    """Return the score that `score_bytes` was given."""
    return float(_SCORE.unpack(body)[0])


def prompt_hash(token_ids: NDArray[np.int32] | Sequence[int]) -> int:
    """Return a hash of a prompt's tokens, 64 bits."""
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little")
