"""A run of a comparison in a process of its own: it frees all memory, and no other run falls with it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from brim.api.compare_order import Ended, RunOrder
from brim.errors import Problem
from brim.notes import Note
from brim.train.observer import Observer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WAIT_S = 0.5
_READ_BYTES = 1 << 16
_PATIENCE = 2  # signals that the run hears; one more ends it
# With this process's path: `-m` would put the current folder first, where a file of the user's may be named `json.py`.
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from brim.api.compare_child import main; sys.exit(main())"


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
