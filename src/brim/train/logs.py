"""Write a run's logs: metrics.jsonl, TensorBoard event files, and peaks for later plans.

metrics.jsonl has one JSON object a line, for each step, evaluation and event of a run. The peaks of the steps are
kept beside what was predicted of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypedDict

import torch

from brim.batching import MicroBatch
from brim.models import peak_bytes
from brim.storage import make_folder, sync, whole_file, writing
from brim.train.figures import Observer, Observers, Record, is_step
from brim.train.run_folder import RunFolder
from brim.train.schedule import RunLength


class RunLogs:
    """Hold the logs that a run writes, and its observers.

    observer: hears what the logs do. mark: what `sync` gave of metrics.jsonl at the checkpoint that a resumed run goes
    on from; None for a new run.
    """

    def __init__(self, run: RunFolder, observer: Observer, *, mark: Mark | None = None) -> None:
        self.metrics, self.tensorboard = MetricsLog(run.metrics, mark), TensorBoardLog(run.tensorboard)
        self.observers = Observers([self.metrics, self.tensorboard, observer])

    @contextmanager
    def open(self, length: RunLength, *, first_step: int) -> Iterator[None]:
        """Keep the logs open while the run trains from this step on."""
        try:
            self.observers.start(
                first_step=first_step, total_steps=length.total_steps, total_samples=length.total_samples
            )
            yield
        finally:
            self.observers.close()

    def sync(self) -> dict[str, Any]:
        """Write the logs to the disk. Return what a checkpoint keeps of them, to recognise them later."""
        self.tensorboard.sync()
        return {"metrics": self.metrics.sync()}


class Mark(TypedDict):
    """Mark how far the log had come, with the digest of what it held."""

    num_bytes: int
    sha256: str


_WRITTEN_WITHIN_S = 0.2


class MetricsLog:
    """Append records to the file, flushed: those of steps that follow one another within 0.2 s together.

    Between passes of the model, a line by itself takes ten times as long as one of several. Evaluations and events do
    not wait, nor does anything when the log is synced or closed. A kill takes no more than such steps, which a resumed
    run makes again.

    mark: what `sync` gave at the checkpoint that a resumed run goes on from; None for a new run.
    A resumed run replays the steps after its checkpoint, and evaluates the test rows at its end; `start` takes the old
    lines of both away, so that each stands in the file once. A line that a kill cut off goes with them.

    Raises WriteError where the file cannot be written.
    """

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        self._path = path
        self._mark = mark
        self._file: IO[bytes] | None = None
        self._waiting: list[Record] = []
        self._written_at_s = 0.0
        self._digest, self._num_bytes = hashlib.sha256(), 0
        self.was_damaged = False  # `start` found other lines than those before the mark, or fewer

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        with writing(self._path.name, self._path):
            self._keep_up_to(first_step)
            self._file = self._path.open("ab")

    def write(self, record: Record) -> None:
        assert self._file is not None, "write before start"
        self._waiting.append({**record})
        if time.monotonic() - self._written_at_s > _WRITTEN_WITHIN_S or not is_step(record):
            self._write_waiting()

    def sync(self) -> Mark:
        """Return once all lines are on the disk: what a resumed run keeps must be there as surely as its checkpoint."""
        self._write_waiting()
        with writing(self._path.name, self._path):
            sync(self._path)
        return {"num_bytes": self._num_bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        if self._file is not None:
            try:
                self._write_waiting()
            finally:
                file, self._file = self._file, None
                with writing(self._path.name, self._path):
                    file.close()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        lines = b"".join(
            json.dumps({name: _plain(value) for name, value in record.items()}).encode() + b"\n" for record in waiting
        )
        if self._file is not None and lines:
            with writing(self._path.name, self._path):
                self._file.write(lines)
                self._file.flush()
            self._take_in(lines)
        self._written_at_s = time.monotonic()

    def _keep_up_to(self, step: int) -> None:
        """Rewrite the file; where there is none, write an empty one, so that its name is on the disk, too."""
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
    """Return the step of a line; infinity for the test rows, which come after all steps, and for other text."""
    try:
        record = json.loads(line)
        return math.inf if record.get("split") == "test" else int(record["step"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf


def _plain(value: Any) -> Any:
    """Return None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Hold the most that steps took whose largest micro-batch, by prediction, had this shape."""

    rows: int
    padded_length: int  # tokens
    predicted_bytes: int
    measured_bytes: int | None  # allocated on a CUDA device, in the forward and backward passes; None elsewhere


class Peaks:
    """Read a CUDA device's counters, without waiting for the device. One peak per shape is kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = 0
        self._by_shape: dict[tuple[int, int], Peak] = {}

    def begin(self) -> None:
        """Begin the passes of a step; what was taken since `most_bytes` was last asked is forgotten."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, micro_batches: Iterable[MicroBatch]) -> None:
        """End the passes of a step, which went well at the first attempt, with these micro-batches."""
        predicted = [(batch.peak_bytes, batch) for batch in micro_batches if batch.peak_bytes is not None]
        if not predicted:
            return
        predicted_bytes, largest = max(predicted, key=lambda pair: pair[0])
        shape = (largest.num_rows, largest.padded_length)
        measured = int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else None
        before = self._by_shape.get(shape)
        if before is not None and before.measured_bytes is not None and measured is not None:
            measured = max(measured, before.measured_bytes)
        self._by_shape[shape] = Peak(
            rows=shape[0], padded_length=shape[1], predicted_bytes=predicted_bytes, measured_bytes=measured
        )

    def most_bytes(self) -> int:
        """Return the most memory used since this object was made, or since the process began: see `peak_bytes`."""
        self._most_bytes = max(self._most_bytes, peak_bytes(self._device))
        return self._most_bytes

    def by_shape(self) -> tuple[Peak, ...]:
        """Return the peaks in the order in which their shapes first came."""
        return tuple(self._by_shape.values())


_NOT_SCALARS = ("step", "split", "event")


_SHOWN_WITHIN_S = 30


_MOST_WAITING = 256  # records


class TensorBoardLog:
    """Write each field as a scalar `<split>/<field>`, of an evaluation of the training rows `train_evaluation/<field>`.

    Other events are left to metrics.jsonl. Raises WriteError where the file cannot be written. Records wait for others:
    by itself, between passes of the model, each takes four times as long. tensorboardX's SummaryWriter is not used: it
    writes in a thread, which ends when the disk is full, and the run would wait for ever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._synced_at_s = 0.0
        self._waiting: list[tuple[float, Record]] = []  # each with its time of day

    @property
    def is_there(self) -> bool:
        """Say whether tensorboardX, an extra of brim, is installed; else nothing is written."""
        return find_spec("tensorboardX") is not None

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        if not self.is_there:
            return
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        with self._writing():
            make_folder(self._folder)
            # Numbered: names count in seconds, and a session that starts in the same second would write over the other.
            number = len(list(self._folder.glob("events.*")))
            self._writer = EventsWriter(str(self._folder / "events"), f".{number}")
        # Hides what an interrupted session wrote after the checkpoint that this one continues.
        self._add(wall_time=time.time(), step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: Record) -> None:
        if self._writer is None or ("split" not in record and record["event"] != "point"):
            return
        self._waiting.append((time.time(), {**record}))
        if time.monotonic() - self._synced_at_s > _SHOWN_WITHIN_S:
            self.sync()
        elif len(self._waiting) == _MOST_WAITING:
            self._write_waiting()

    def sync(self) -> None:
        """Return once all events are on the disk."""
        if self._writer is None:
            return
        self._write_waiting()
        with self._writing():
            self._writer.flush()
        self._synced_at_s = time.monotonic()

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._write_waiting()
        finally:
            writer, self._writer = self._writer, None
            with self._writing():
                writer.close()

    def _write_waiting(self) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        waiting, self._waiting = self._waiting, []
        for wall_time, record in waiting:
            group = _group(record)
            scalars = [
                Summary.Value(tag=f"{group}/{name}", simple_value=value)
                for name, value in record.items()
                if name not in _NOT_SCALARS and isinstance(value, (int, float))
            ]
            # One event a record: each has its price.
            self._add(wall_time=wall_time, step=record["step"], summary=Summary(value=scalars))

    def _add(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with self._writing():
            self._writer.write_event(Event(**content))

    def _writing(self) -> AbstractContextManager[None]:
        return writing("the TensorBoard file", self._folder)


def _group(record: Record) -> str:
    if "split" not in record:
        return str(record["event"])
    return f"{record['split']}_evaluation" if "event" in record else str(record["split"])
