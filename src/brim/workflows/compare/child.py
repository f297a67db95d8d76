"""Run one run of a comparison in a process of its own: it frees all memory, and no other run falls with it.

The run is trained to its end and judged by its last weights. The process is started by `run_in_process` alone, with a
`RunOrder`; it reads the order from stdin, and says what happens as JSON, a line each, on stdout. It stops, with a
checkpoint, once its stdin is closed, so that it does not outlive the process that started it, however that ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

from brim.errors import BrimError, InputError, Problem
from brim.notes import Note, Say, kind_of, topic_of
from brim.train import Observer, Record

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
    from brim.workflows.training import train_configuration  # here, where Ctrl-C is caught: torch takes seconds

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
    from brim.batching import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    return Problem(what="the memory of the device, or of the machine, is used up", fix="free memory; `brim plan` helps")


def _print_traceback() -> None:
    from brim.config import mask_text

    sys.stderr.write(mask_text(traceback.format_exc()))


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


_WAIT_S = 0.5


_READ_BYTES = 1 << 16


_PATIENCE = 2  # signals that the run hears; one more ends it


# With this process's path: `-m` would put the current folder first, where a file of the user's may be named `json.py`.
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from brim.workflows.compare.child import main; sys.exit(main())"


class Stop:
    """Whether Ctrl-C was pressed, which the run that is going on hears, too."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.num_asked += 1
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if self.num_asked <= _PATIENCE else signal.SIGKILL)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM go to the run: the first lets it save its step. Not outside the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_process(order: RunOrder, *, observer: Observer, say: Callable[[str], None], stop: Stop) -> Ended:
    """Train in a new process, and pass on what it tells."""
    command = [sys.executable, "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]
    # In a session of its own, so that a terminal's Ctrl-C reaches it once, through `stop`.
    with subprocess.Popen(
        [*command, "-c", _CHILD, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        stop.process = process
        if stop.num_asked:  # just before
            process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it was ended before it could read
            process.stdin.write(order.dumps().encode() + b"\n")
            process.stdin.flush()
        ended = _heard(process, observer, say)
        code = process.wait()  # before its stdin is closed, which would stop it
        stop.process = None
    if ended is not None:
        return ended
    if stop.num_asked:
        return Ended(outcome="stopped", rows={})
    return Ended(outcome="failed", rows={}, problems=(_died(code),))


def _heard(process: subprocess.Popen[bytes], observer: Observer, say: Callable[[str], None]) -> Ended | None:
    """What its last message says; None where it ended without one."""
    assert process.stdout is not None
    ended, is_open = None, False
    try:
        for line in _lines(process.stdout.fileno()):
            message: Mapping[str, Any] = json.loads(line)
            if "say" in message:
                say(Note(message["say"], kind=message.get("kind", "note"), topic=message.get("topic", "")))
            elif "start" in message:
                is_open = True
                observer.start(**message["start"])
            elif "record" in message:
                observer.write(message["record"])
            elif "close" in message:
                is_open = False
                observer.close()
            elif "finished" in message:
                ended = Ended(outcome="finished", rows=message["finished"])
            elif "failed" in message:
                problems = tuple(Problem(**problem) for problem in message["failed"]["problems"])
                is_users = bool(message["failed"]["is_users_mistake"])
                ended = Ended(outcome="failed", rows={}, problems=problems, is_users_mistake=is_users)
    finally:
        if is_open:
            observer.close()
    return ended


def _lines(descriptor: int) -> Iterator[bytes]:
    """Whole lines, until the end; one that a kill cut off is none.

    Waits in short stretches: a signal that comes just before a wait is heard after it.
    """
    begun = b""
    while True:
        if not select.select([descriptor], [], [], _WAIT_S)[0]:
            continue
        read = os.read(descriptor, _READ_BYTES)
        if not read:
            return
        *whole, begun = (begun + read).split(b"\n")
        yield from whole


def _died(code: int) -> Problem:
    killed = "; the system ends a process that takes too much memory" if code == -signal.SIGKILL else ""
    return Problem(what=f"its process ended with {code}{killed}", fix="what it printed stands above")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What is to be trained."""

    config: str  # a YAML file
    overrides: tuple[str, ...]
    output_directory: str
    resume: bool  # continue what is there, if there is anything

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RunOrder:
        told = json.loads(text)
        return cls(**{**told, "overrides": tuple(told["overrides"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    outcome: Literal["finished", "failed", "stopped"]
    rows: Mapping[str, str]  # of a finished run: split -> a digest of which rows it holds
    problems: tuple[Problem, ...] = ()  # of a failed one
    is_users_mistake: bool = False  # what failed it is wrong with the configuration or the data


def signal_when_alone(number: signal.Signals) -> None:
    """Send this process the signal once its stdin closes, whose other end the process that started it holds."""
    threading.Thread(target=_watch, args=(number,), daemon=True).start()


def _watch(number: signal.Signals) -> None:
    # Not sys.stdin: its lock would be held when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), number)
