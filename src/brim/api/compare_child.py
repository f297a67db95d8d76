"""The process of one run, which `compare_process` alone starts.

Reads an order from stdin, and tells what happens as JSON, a line each, on stdout. It stops, with a checkpoint, once its
stdin is closed, so that it does not outlive the process that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from brim.api.compare_order import RunOrder
from brim.api.parent_watch import signal_when_alone
from brim.errors import BrimError, InputError, Problem
from brim.notes import Say, kind_of, topic_of
from brim.train.observer import Observer, Record

INTERRUPTED = 130


class Told:
    """An observer that passes on what it hears."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self.tell(start={"first_step": first_step, "total_steps": total_steps, "total_samples": total_samples})

    def write(self, record: Record) -> None:
        self.tell(record=record)

    def close(self) -> None:
        self.tell(close=True)

    def say(self, line: str) -> None:
        self.tell(say=line, kind=kind_of(line), topic=topic_of(line))

    def tell(self, **message: Any) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()


def main() -> int:
    """Carry one order out; 0 where what came of it was told, be it a failure, or 130 where it was stopped."""
    order = RunOrder.loads(sys.stdin.readline())
    told = Told(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what libraries print is no message
    signal_when_alone(signal.SIGTERM)
    try:
        told.tell(finished=run(order, observer=told, say=told.say))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrimError as error:
        told.tell(failed=_failed(error.problems, is_users_mistake=isinstance(error, InputError)))
    except Exception as error:
        problem = _out_of_memory(error)
        if problem is None:
            _print_traceback()
            problem = Problem(what=f"a mistake of brim's own or of a library: {type(error).__name__}, told above")
        told.tell(failed=_failed((problem,), is_users_mistake=False))
    return 0


def run(order: RunOrder, *, observer: Observer, say: Say) -> dict[str, str]:
    """Train as the order says, judged by the last weights; for each split a digest of which rows it holds."""
    from brim.api.training import train_configuration  # here, where Ctrl-C is caught: torch takes seconds

    output = Path(order.output_directory)
    prepared = train_configuration(
        order.config,
        order.overrides,
        output_directory=output,
        resume=order.resume and output.exists(),
        observer=observer,
        say=say,
        weights="last",
    )
    return {
        split: hashlib.sha256(rows.keys.astype("<i8").tobytes()).hexdigest() for split, rows in prepared.splits.items()
    }


def _failed(problems: tuple[Problem, ...], *, is_users_mistake: bool) -> dict[str, Any]:
    return {"problems": [asdict(problem) for problem in problems], "is_users_mistake": is_users_mistake}


def _out_of_memory(error: Exception) -> Problem | None:
    from brim.batching.oom import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    return Problem(what="the memory of the device, or of the machine, is used up", fix="free memory; `brim plan` helps")


def _print_traceback() -> None:
    from brim.config import mask_text

    sys.stderr.write(mask_text(traceback.format_exc()))
