"""The run's numbers as TensorBoard event files."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from brim.files import make_folder, writing
from brim.train.observer import Record

_NOT_SCALARS = ("step", "split", "event")
_SHOWN_WITHIN_S = 30


class TensorBoardLog:
    """One scalar a field, under `<split>/<field>`; of an evaluation of the training rows, `train_evaluation/<field>`.

    Other events are left to metrics.jsonl. Raises WriteError where the file cannot be written. tensorboardX's
    SummaryWriter is not used: it writes in a thread, which ends at a full disk, and then the run waits for it for ever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._synced_at_s = 0.0

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        with self._writing():
            make_folder(self._folder)
            # Numbered: the name has only seconds, and a session that starts in the same one would write over the other.
            number = len(list(self._folder.glob("events.*")))
            self._writer = EventsWriter(str(self._folder / "events"), f".{number}")
        # Hides what an interrupted session wrote after the checkpoint that this one continues.
        self._add(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: Record) -> None:
        if "split" not in record and record["event"] != "point":
            return
        from tensorboardX.summary import scalar

        group = _group(record)
        for name, value in record.items():
            if name not in _NOT_SCALARS and isinstance(value, (int, float)):
                self._add(step=record["step"], summary=scalar(f"{group}/{name}", value))
        if time.monotonic() - self._synced_at_s > _SHOWN_WITHIN_S:
            self.sync()

    def sync(self) -> None:
        """Return once all events are on the disk."""
        with self._writing():
            self._writer.flush()
        self._synced_at_s = time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with self._writing():
                writer.close()

    def _add(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with self._writing():
            self._writer.write_event(Event(wall_time=time.time(), **content))

    def _writing(self) -> AbstractContextManager[None]:
        return writing("the TensorBoard file", self._folder)


def _group(record: Record) -> str:
    if "split" not in record:
        return str(record["event"])
    return f"{record['split']}_evaluation" if "event" in record else str(record["split"])
