"""Many vectors of one width, written in any order: in memory, or in a file without a name where that would be much."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from brim.errors import Problem, WriteError

Vectors = NDArray[np.float32]

_ITEM_BYTES = 4


class VectorStore:
    """Places for N vectors of fp32, whose width is known once the first of them is there.

    folder: where the file lies, which has no name and goes with the object; None keeps all in memory.
    """

    def __init__(self, num_vectors: int, *, folder: Path | None) -> None:
        self._num_vectors, self._folder = num_vectors, folder
        self.width = 0
        self._held: Vectors = np.zeros((num_vectors, 0), dtype=np.float32)
        with self._told():
            self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __enter__(self) -> VectorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, first: int, vectors: Vectors) -> None:
        """Take [n, D] for the places from `first` on. Raises WriteError when the disk does not take them."""
        if not self.width:
            self.width = vectors.shape[1]
            if self._file is None:
                self._held = np.zeros((self._num_vectors, self.width), dtype=np.float32)
        assert vectors.shape[1] == self.width, "vectors of one width"
        if self._file is None:
            self._held[first : first + len(vectors)] = vectors
            return
        with self._told():
            self._file.seek(first * self.width * _ITEM_BYTES)
            self._file.write(np.ascontiguousarray(vectors, dtype=np.float32).data)
            self._file.flush()

    def read(self, first: int, end: int) -> Vectors:
        """[end - first, D]: what was put there; a view of what is held in memory."""
        if self._file is None:
            return self._held[first:end]
        self._file.seek(first * self.width * _ITEM_BYTES)
        content = self._file.read((end - first) * self.width * _ITEM_BYTES)
        return np.frombuffer(content, dtype=np.float32).reshape(end - first, self.width)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                Problem(
                    what=f"what was collected cannot be kept: {error.strerror}",
                    where=str(self._folder),
                    fix="make room there, or name an output on a larger disk",
                )
            ) from error
