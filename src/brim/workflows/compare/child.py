"""Train one run of a comparison in its own process, to its end; its last weights are judged."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from brim.notes import Note, kind_of, short_of, topic_of
from brim.train import Observer, Record
from brim.workflows.runs import Ended, Stop, Tell, TrainOrder, run_child


def run_in_process(order: TrainOrder, *, observer: Observer, say: Callable[[str], None], stop: Stop) -> Ended:
    """Train in a new process, and pass its messages on; it saves a checkpoint and stops once this process is gone.

    The result is, for each split, a digest of which rows it holds.
    """
    heard = _Heard(observer, say)
    try:
        return run_child(train, asdict(order), on_message=heard, stop=stop, when_alone=signal.SIGTERM)
    finally:
        heard.close()


class _Heard:
    """Pass the child's messages on to an observer, and close it where the child could not."""

    def __init__(self, observer: Observer, say: Callable[[str], None]) -> None:
        self._observer, self._say = observer, say
        self._is_open = False

    def __call__(self, message: Mapping[str, Any]) -> None:
        if "say" in message:
            self._say(Note(**message["say"]))
        elif "start" in message:
            self._is_open = True
            self._observer.start(**message["start"])
        elif "record" in message:
            self._observer.write(message["record"])
        elif "close" in message:
            self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._observer.close()


class Told:
    """Send what an observer hears to the process that started this one."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._tell(start={"first_step": first_step, "total_steps": total_steps, "total_samples": total_samples})

    def write(self, record: Record) -> None:
        self._tell(record=record)

    def close(self) -> None:
        self._tell(close=True)

    def say(self, line: str) -> None:
        self._tell(say={"text": line, "kind": kind_of(line), "topic": topic_of(line), "short": short_of(line)})


def train(order: Mapping[str, Any], tell: Tell) -> dict[str, str]:
    """Carry out a `TrainOrder`, in the child."""
    told = Told(tell)
    return run(TrainOrder(**order), observer=told, say=told.say)


def run(order: TrainOrder, *, observer: Observer, say: Callable[[str], None]) -> dict[str, str]:
    """Train, and keep the last weights. Return, for each split, a digest of which rows it holds."""
    from brim.workflows.training import train_configuration  # here, where Ctrl-C is caught: torch takes seconds

    prepared = train_configuration(order, observer=observer, say=say, weights="last")
    return {
        split: hashlib.sha256(rows.keys.astype("<i8").tobytes()).hexdigest() for split, rows in prepared.splits.items()
    }
