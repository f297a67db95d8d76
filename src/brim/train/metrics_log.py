"""metrics.jsonl: one JSON object a line, for each step, evaluation and event of a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from brim.train.observer import Record


class MetricsLog:
    """Appends records to the file, each line flushed.

    A resumed run replays the steps after its checkpoint, and evaluates the test rows at its end; `start` takes the old
    lines of both away, so that each stands in the file once. A line that a kill cut off goes with them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def start(self, *, first_step: int, total_steps: int) -> None:
        self._keep_up_to(first_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        assert self._file is not None, "write before start"
        self._file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        self._file.flush()
        if record.get("event") == "checkpoint":
            os.fsync(self._file.fileno())  # what a resumed run keeps must be on disk as surely as its checkpoint

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep_up_to(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                if record["step"] <= step and record.get("split") != "test":
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def _plain(value: Any) -> Any:
    """Null for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
