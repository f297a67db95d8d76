"""Run what benchmarks/schedule_kills.py kills, in a child that kills itself in the place that it is told."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Say when a process kills itself: at the so-many-th place of a kind that it comes to."""

    place: str  # "accumulation": before a micro-batch; "time"; else what a line of the log has just been written of
    number: int = 0  # from 1
    delay_s: float = 0.0  # of "time": since the loop began

    @staticmethod
    def places_of(record: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a line of the log is written at; the step that ends an epoch is both."""
        event, split = record.get("event"), record.get("split")
        if event is not None:
            yield {"schedule": "switch"}.get(event, event)
        elif split == "train":
            yield "step"
        elif split == "validation":
            yield "evaluation"
        if split == "train" and event is None and record["num_samples"] % NUM_TRAINING_ROWS == 0:
            yield "epoch"


NUM_TRAINING_ROWS = 28  # of faults.subject


class _Killer:
    """Observe a run, as the last of its observers: what it kills at has been written."""

    def __init__(self, moment: Moment) -> None:
        self._moment, self._number = moment, 0

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        if self._moment.place == "time":
            timer = threading.Timer(self._moment.delay_s, _kill)
            timer.daemon = True
            timer.start()

    def write(self, record: Mapping[str, Any]) -> None:
        for place in Moment.places_of(record):
            self.come_to(place)

    def close(self) -> None: ...

    def come_to(self, place: str) -> None:
        if place != self._moment.place:
            return
        self._number += 1
        if self._number == self._moment.number:
            _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(run: str, moment_json: str) -> None:
    """Train as ./config.yaml says, or go on; the loop's seconds are printed.

    moment_json: a Moment, or null to train to the end.
    """
    import brim
    from brim.train import MicroBatchPass

    told = json.loads(moment_json)
    killer = _Killer(Moment(place="") if told is None else Moment(**told))
    run_micro_batch = MicroBatchPass.__call__

    def watched(self: MicroBatchPass, *arguments: Any, **named: Any) -> Any:
        killer.come_to("accumulation")
        return run_micro_batch(self, *arguments, **named)

    MicroBatchPass.__call__ = watched  # type: ignore[method-assign]
    result = brim.Model("config.yaml").train(output_directory=Path(run), resume=True, observer=killer)
    print(result.seconds)
