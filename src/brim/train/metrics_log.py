"""metrics.jsonl: one JSON object a line, for each step, evaluation and event of a run."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import IO, Any, TypedDict

from brim.files import sync, whole_file, writing
from brim.train.observer import Record


class Mark(TypedDict):
    """How far the log had come, and the digest of what it held."""

    num_bytes: int
    sha256: str


class MetricsLog:
    """Appends records to the file, each line flushed.

    mark: what `sync` gave at the checkpoint that a resumed run goes on from; None for a new run.
    A resumed run replays the steps after its checkpoint, and evaluates the test rows at its end; `start` takes the old
    lines of both away, so that each stands in the file once. A line that a kill cut off goes with them.

    Raises WriteError where the file cannot be written.
    """

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        self._path = path
        self._mark = mark
        self._file: IO[bytes] | None = None
        self._digest, self._num_bytes = hashlib.sha256(), 0
        self.was_damaged = False  # `start` found other lines than those before the mark, or fewer

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        with writing(self._path.name, self._path):
            self._keep_up_to(first_step)
            self._file = self._path.open("ab")

    def write(self, record: Record) -> None:
        assert self._file is not None, "write before start"
        line = json.dumps({name: _plain(value) for name, value in record.items()}).encode() + b"\n"
        with writing(self._path.name, self._path):
            self._file.write(line)
            self._file.flush()
        self._take_in(line)

    def sync(self) -> Mark:
        """Return once all lines are on the disk: what a resumed run keeps must be there as surely as its checkpoint."""
        with writing(self._path.name, self._path):
            sync(self._path)
        return {"num_bytes": self._num_bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self._path.name, self._path):
                file.close()

    def _keep_up_to(self, step: int) -> None:
        """Write the file anew, and an empty one where there is none, so that its name is on the disk, too."""
        content = self._path.read_bytes() if self._path.is_file() else b""
        if self._mark is not None:
            before = content[: self._mark["num_bytes"]]
            self.was_damaged = hashlib.sha256(before).hexdigest() != self._mark["sha256"]
        kept = b"".join(line + b"\n" for line in content.splitlines() if _step_of(line) <= step)
        self._take_in(kept)
        with whole_file(self._path) as temporary:
            temporary.write_bytes(kept)

    def _take_in(self, lines: bytes) -> None:
        self._digest.update(lines)
        self._num_bytes += len(lines)


def _step_of(line: bytes) -> float:
    """The step that a line is of; infinity for the test rows, which come after all steps, and for what is none."""
    try:
        record = json.loads(line)
        return math.inf if record.get("split") == "test" else int(record["step"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf


def _plain(value: Any) -> Any:
    """Null for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
