"""The run's numbers as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brim.train.observer import Record

_NOT_SCALARS = ("step", "split", "event")


class TensorBoardLog:
    """One scalar a field, under `<split>/<field>`; of an evaluation of the training rows, `train_evaluation/<field>`.

    Other events are left to metrics.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, *, first_step: int, total_steps: int) -> None:
        from tensorboardX import SummaryWriter

        # Numbered, since the name has only seconds: a session that starts in the same one would write over the other.
        number = len(list(self._folder.glob("events.*")))
        # purge_step hides what an interrupted session wrote after the checkpoint that this one continues.
        self._writer = SummaryWriter(str(self._folder), purge_step=first_step + 1, filename_suffix=f".{number}")

    def write(self, record: Record) -> None:
        if record.get("event") == "checkpoint":
            self._writer.flush()
        if "split" not in record:
            return
        group = f"{record['split']}_evaluation" if "event" in record else record["split"]
        for name, value in record.items():
            if name not in _NOT_SCALARS and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
