"""metrics.jsonl: one JSON object a line, for each step, evaluation and event of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from brim.files import sync, whole_file, writing
from brim.train.observer import Record


class MetricsLog:
    """Appends records to the file, each line flushed.

    A resumed run replays the steps after its checkpoint, and evaluates the test rows at its end; `start` takes the old
    lines of both away, so that each stands in the file once. A line that a kill cut off goes with them.

    Raises WriteError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.num_unreadable = 0  # lines, before the last one, that `start` found damaged and left out

    def start(self, *, first_step: int, total_steps: int) -> None:
        with writing(self._path.name, self._path):
            self._keep_up_to(first_step)
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        assert self._file is not None, "write before start"
        with writing(self._path.name, self._path):
            self._file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Return once all lines are on the disk: what a resumed run keeps must be there as surely as its checkpoint."""
        with writing(self._path.name, self._path):
            sync(self._path)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self._path.name, self._path):
                file.close()

    def _keep_up_to(self, step: int) -> None:
        """Write the file anew, and an empty one where there is none, so that its name is on the disk, too."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        steps = [_step_of(line) for line in lines]
        self.num_unreadable = steps[:-1].count(None)
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        with whole_file(self._path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float | None:
    """The step that a line is of; None where it is damaged. The test rows are evaluated after all steps."""
    try:
        record = json.loads(line)
        return math.inf if record.get("split") == "test" else int(record["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _plain(value: Any) -> Any:
    """Null for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
