"""Run a function of brim in a child process: its memory is freed when it ends, and its crash ends nothing else.

`run_child` starts it with a function and an order, which goes to its stdin as JSON; its messages come from its stdout,
one line of JSON each. Who talks with several children starts each as a `Child`, and may send it further lines. It does
not outlive the process that started it, however that ends: its stdin closes then, and it gets a signal. Where several
processes are to train together, the child launches them: each calls the function, and the first has the child's stdout.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import brim.errors
from brim.errors import BrimError, Problem
from brim.storage import scratch_folder
from brim.workflows.runs.serving import FAILED, PYTHON, READ_BYTES, SERVE, SIGNALS, START, Tell, write


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Say how a child ended."""

    code: int  # the exit code; minus the signal where one ended it
    is_done: bool = False  # its function returned
    result: Any = None  # what it returned, as JSON has it
    error: BrimError | None = None  # what it raised
    was_stopped: bool = False  # it was asked to stop, and neither returned nor failed

    def require(self, what: str, *, fix: str, log: Path | None = None) -> Any:
        """Return the result; raise the child's own error, or say how the process ended. what: "a process that …"."""
        if self.error is not None:
            raise self.error
        if self.is_done:
            return self.result
        raise BrimError(what=f"{what} ended {_ending(self.code)}{_last_line(log)}", fix=fix)


def _ending(code: int) -> str:
    killed = "; the system ends a process that takes too much memory" if code == -signal.SIGKILL else ""
    return f"by itself ({f'signal {-code}' if code < 0 else f'exit code {code}'}{killed})"


def _last_line(log: Path | None) -> str:
    if log is None:
        return ""
    lines = _last_lines(log, 1)
    return f": {lines[0].strip()}" if lines else ": it said nothing"


def _last_lines(log: Path, most: int) -> list[str]:
    """Return the last lines of what a child printed, without empty ones and without secrets."""
    from brim.config.text import mask_text

    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - READ_BYTES))
        text = mask_text(file.read().decode(errors="replace"))
    return [line.rstrip() for line in text.splitlines() if line.strip()][-most:]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder:
    """Say what a process is to train, in texts and numbers alone, so that it can be sent as JSON."""

    config: str  # a YAML file
    overrides: Sequence[str]
    output_directory: str
    resume: bool  # continue what is there, if there is anything
    dataset: str | Sequence[str] | None = None  # None: the key `dataset`
    num_processes: int = 1  # that train together


_WAIT_S = 0.5

_END_S = 5.0  # in which a process that was killed ends, unless a driver holds it

_PATIENCE = 2  # signals that are passed on; one more kills the child

_FROM_STDIN = "open(0, 'rb', 0, closefd=False).readline()"  # as far as the line goes: others may follow

_CHILD = (
    START.format(order=_FROM_STDIN)
    + "from brim.workflows.runs.serving import messages, serve, signal_when_alone\n"
    + "heard = signal_when_alone(int(sys.argv[1])); told = messages()\n"
    + SERVE
)

_LAUNCHER = (
    START.format(order=_FROM_STDIN)
    + "from brim.workflows.runs.serving import launch, signal_when_alone\n"
    + "signal_when_alone(int(sys.argv[1])); sys.exit(launch('{module}', '{name}', order, {num_processes}, {folder!r}))"
)


class Stop:
    """Count presses of Ctrl-C, and pass them on to the child that is running."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.num_asked += 1
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if self.num_asked <= _PATIENCE else signal.SIGKILL)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Pass Ctrl-C and SIGTERM on to the child: the first lets it save its step. Not outside the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_child(
    function: Callable[[Mapping[str, Any], Tell], Any],
    order: Mapping[str, Any],
    *,
    on_message: Callable[[Mapping[str, Any]], None] = lambda message: None,
    stop: Stop | None = None,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    when_alone: signal.Signals = signal.SIGKILL,
    num_processes: int = 1,
) -> Ended:
    """Call `function(order, tell)` in a new process, and pass its messages on.

    stop: passes signals on. Other arguments as in Child.
    """
    how: dict[str, Any] = {"log": log, "environment": environment, "when_alone": when_alone}
    with closing(Child(function, order, num_processes=num_processes, **how)) as child:
        if stop is not None:
            stop.process = child.process
            if stop.num_asked:  # just before
                child.process.send_signal(signal.SIGINT)
        while child.ended is None:
            # Each wait is short: a signal that comes just before it is handled after it.
            if select.select([child], [], [], _WAIT_S)[0]:
                for message in child.heard():
                    on_message(message)
        if stop is None:
            return child.ended
        stop.process = None
        said_how = child.ended.is_done or child.ended.error is not None
        return replace(child.ended, was_stopped=bool(stop.num_asked) and not said_how)


class Child:
    """Hold a function of brim that runs in a child process, and talk with it. Closing kills it, and what it started.

    function: of a module of brim. log: a file for what the process prints; None: it is printed here. environment:
    variables that it has beside this process's, or instead. when_alone: the signal that the child gets once this
    process has ended. num_processes: that train together, each of which calls the function; messages and the result are
    the first one's, and the error is that of the one that failed first. They are not sent further lines.
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Any], Tell], Any],
        order: Mapping[str, Any],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        when_alone: signal.Signals = signal.SIGKILL,
        num_processes: int = 1,
    ) -> None:
        self.ended: Ended | None = None
        self._log = log
        self._begun = bytearray()  # a line that is not whole yet
        self._unsent = bytearray()  # for which the pipe has no room yet
        self._sending = threading.Lock()  # an actor sends in one thread and listens in another
        self._told: dict[str, Any] = {}  # its last message: how it ended; empty where it did not say
        self._folder = ExitStack()  # of this process, since the launcher may be killed
        folder = None
        if num_processes > 1:
            folder = str(self._folder.enter_context(scratch_folder("brim-processes-")))
        self.process = _process(function, log, environment or {}, when_alone, num_processes, folder)
        assert self.process.stdin is not None, "it was opened as a pipe"
        write(self.process.stdin, order)  # which every child reads at once
        os.set_blocking(self.process.stdin.fileno(), False)

    def fileno(self) -> int:
        """Return what `select` waits for."""
        assert self.process.stdout is not None, "it was opened as a pipe"
        return self.process.stdout.fileno()

    def sends(self) -> list[IO[bytes]]:
        """Return what `select` waits for where something is left to send: nothing otherwise."""
        return [self.process.stdin] if self._unsent and self.process.stdin is not None else []

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, which its function hears; one that ends cannot. What the pipe does not take, `send_on` does.

        It does not wait: a child that is stopped reads nothing.
        """
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._unsent += line
        self.send_on()

    def send_on(self) -> None:
        """Send as much of what is left as the pipe takes."""
        assert self.process.stdin is not None, "it was opened as a pipe"
        with self._sending:
            try:
                while self._unsent:
                    del self._unsent[: os.write(self.process.stdin.fileno(), self._unsent)]
            except BlockingIOError:
                pass
            except BrokenPipeError:  # this process will see how it has ended
                self._unsent.clear()

    def heard(self) -> Iterator[dict[str, Any]]:
        """Wait until there are messages, or it has ended; yield the whole ones, without a line that a kill cut off."""
        if not (read := os.read(self.fileno(), READ_BYTES)):
            self._end()
            return
        self._begun += read
        if b"\n" not in read:  # of a long line no part is looked at twice
            return
        *whole, self._begun = self._begun.split(b"\n")
        for line in whole:
            message = _message(line)
            if message.keys() & {"done", FAILED}:
                self._told = message
            elif message:
                yield message

    def has_ended(self) -> bool:
        """Return whether it has ended, and all was heard, though what it has started may hold its stdout open."""
        if self.ended is None and self.process.poll() is not None and not select.select([self], [], [], 0)[0]:
            self._end()
        return self.ended is not None

    def last_lines(self, most: int) -> list[str]:
        """Return the last lines of what it has printed into its log."""
        return [] if self._log is None else _last_lines(self._log, most)

    def _end(self) -> None:
        code, told = self.process.wait(), self._told  # before its stdin is closed, which would end it
        error = _error_of(told[FAILED]) if FAILED in told else None
        self.ended = Ended(code=code, is_done="done" in told, result=told.get("done"), error=error)

    def close(self) -> None:
        """Kill it, where it still runs, and what it has started. One that a driver holds is left."""
        with suppress(ProcessLookupError, PermissionError):  # it has a session, and so a group, of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None, "it was opened as a pipe"
            stream.close()
        self._folder.close()


def _process(
    function: Callable[[Mapping[str, Any], Tell], Any],
    log: Path | None,
    environment: Mapping[str, str],
    when_alone: signal.Signals,
    num_processes: int,
    folder: str | None,
) -> subprocess.Popen[bytes]:
    names = {"module": function.__module__, "name": function.__name__}
    start = _CHILD.format(**names)
    if num_processes > 1:
        start = _LAUNCHER.format(**names, num_processes=num_processes, folder=folder)
    with ExitStack() as stack:
        # In a session of its own, so that a terminal's Ctrl-C reaches it once, through `stop`.
        return subprocess.Popen(
            [*PYTHON, start, str(int(when_alone)), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if log is None else stack.enter_context(log.open("wb")),
            bufsize=0,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _message(line: bytes | bytearray) -> dict[str, Any]:
    """Return a child's message; an empty one for a line of others: what runs before brim's code may print, too."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _error_of(told: Mapping[str, Any]) -> BrimError:
    """Return the error that the child ended with, of its own class, so that the exit code is the same."""
    kind = getattr(brim.errors, told["error"], BrimError)
    assert issubclass(kind, BrimError), "as the child wrote it"
    error: BrimError = kind(*(Problem(**problem) for problem in told["problems"]))
    return error
