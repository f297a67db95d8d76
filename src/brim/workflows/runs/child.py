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
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, Protocol

import brim.errors
from brim.errors import BrimError, Problem


class Tell(Protocol):
    """Send messages to the process that started a child, or hear what that one sends; its function is given one."""

    def __call__(self, **message: Any) -> None: ...

    def hear(self) -> dict[str, Any]:
        """Wait for the next message."""
        ...


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
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ": it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder:
    """Say what a process is to train, in texts and numbers alone, so that it can be sent as JSON."""

    config: str  # a YAML file
    overrides: Sequence[str]
    output_directory: str
    resume: bool  # continue what is there, if there is anything
    dataset: str | Sequence[str] | None = None  # None: the key `dataset`
    num_processes: int = 1  # that train together


_INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_WAIT_S = 0.5

_READ_BYTES = 1 << 16

_PATIENCE = 2  # signals that are passed on; one more kills the child

_PYTHON = (sys.executable, "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", "-c")

# With this process's path: `-m` would put the current folder first, where the user may have a file named `json.py`.
_START = "import sys; order = {order}; sys.path[:] = sys.argv[2:]\n"

_FROM_STDIN = "open(0, 'rb', 0, closefd=False).readline()"  # as far as the line goes: others may follow

_SERVE = (  # which catches Ctrl-C: to import takes seconds
    "def call(order, tell):\n"
    "    from {module} import {name}\n"
    "    return {name}(order, tell)\n"
    "sys.exit(serve(call, order, told, heard))"
)

_CHILD = (
    _START.format(order=_FROM_STDIN)
    + "from brim.workflows.runs.child import messages, serve, signal_when_alone\n"
    + "heard = signal_when_alone(int(sys.argv[1])); told = messages()\n"
    + _SERVE
)

_LAUNCHER = (
    _START.format(order=_FROM_STDIN)
    + "from brim.workflows.runs.child import launch, signal_when_alone\n"
    + "signal_when_alone(int(sys.argv[1])); sys.exit(launch('{module}', '{name}', order, {num_processes}, {folder!r}))"
)

_RANK = (
    _START.format(order="open(sys.argv[1], encoding='utf-8').read()")
    + "from brim.distributed import watch_parent; watch_parent()\n"
    + "from brim.workflows.runs.child import messages, serve; told, heard = messages(), None\n"
    + _SERVE
)

_FAILED = "failed"  # the key of the message on an error


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
    before = {number: signal.signal(number, stop.ask) for number in _SIGNALS}
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
    """Hold a function of brim that runs in a child process, and talk with it. Closing kills it.

    function: of a module of brim. log: a file for what the process prints; None: it is printed here. environment:
    further variables; this process's own win. when_alone: the signal that the child gets once this process has ended.
    num_processes: that train together, each of which calls the function; messages and the result are the first one's,
    and the error is that of the one that failed first. They are not sent further lines.
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
        self._begun: bytes = b""  # a line that is not whole yet
        self._told: dict[str, Any] = {}  # its last message: how it ended; empty where it did not say
        self._folder = ExitStack()  # of this process, since the launcher may be killed
        folder = None
        if num_processes > 1:
            temporary = tempfile.TemporaryDirectory(prefix="brim-processes-", ignore_cleanup_errors=True)
            folder = self._folder.enter_context(temporary)
        self.process = _process(function, log, environment or {}, when_alone, num_processes, folder)
        self.send(order)

    def fileno(self) -> int:
        """Return what `select` waits for."""
        assert self.process.stdout is not None, "it was opened as a pipe"
        return self.process.stdout.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, which its function hears; one that ends cannot."""
        assert self.process.stdin is not None, "it was opened as a pipe"
        _write(self.process.stdin, message)

    def heard(self) -> Iterator[dict[str, Any]]:
        """Wait until there are messages, or it has ended; yield the whole ones, without a line that a kill cut off."""
        if not (read := os.read(self.fileno(), _READ_BYTES)):
            code, told = self.process.wait(), self._told  # before its stdin is closed, which would end it
            error = _error_of(told[_FAILED]) if _FAILED in told else None
            self.ended = Ended(code=code, is_done="done" in told, result=told.get("done"), error=error)
            return
        *whole, self._begun = (self._begun + read).split(b"\n")
        for line in whole:
            message: dict[str, Any] = json.loads(line)
            if message.keys() & {"done", _FAILED}:
                self._told = message
            else:
                yield message

    def close(self) -> None:
        """Kill it, where it still runs."""
        self.process.kill()
        self.process.wait()
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
            [*_PYTHON, start, str(int(when_alone)), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if log is None else stack.enter_context(log.open("wb")),
            bufsize=0,
            env={**environment, **os.environ},
            start_new_session=True,
        )


def _write(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write a line to an unbuffered stream: a signal's handler cannot write to a buffered one that is being written.

    Where nobody reads any more, the other process has ended, and this one will see that without it.
    """
    line = json.dumps(message).encode() + b"\n"
    with suppress(BrokenPipeError):
        while line:  # a signal may cut a write short
            line = line[stream.write(line) :]


def _error_of(told: Mapping[str, Any]) -> BrimError:
    """Return the error that the child ended with, of its own class, so that the exit code is the same."""
    kind = getattr(brim.errors, told["error"], BrimError)
    assert issubclass(kind, BrimError), "as the child wrote it"
    error: BrimError = kind(*(Problem(**problem) for problem in told["problems"]))
    return error


def messages() -> IO[bytes]:
    """Return the stream for messages, in the child; what libraries print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return stream


class _Tell:
    """Send lines of JSON, and receive them."""

    def __init__(self, stream: IO[bytes], lines: SimpleQueue[bytes]) -> None:
        self._stream, self._lines = stream, lines

    def __call__(self, **message: Any) -> None:
        _write(self._stream, message)

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._lines.get())
        return message


def serve(
    function: Callable[[Mapping[str, Any], Tell], Any],
    order: str | bytes,
    stream: IO[bytes],
    lines: SimpleQueue[bytes] | None = None,
) -> int:
    """Carry out an order, in the child. Return 0 where its result or its error was sent. lines: that come later."""
    tell = _Tell(stream, lines or SimpleQueue())
    try:
        tell(done=function(json.loads(order), tell))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrimError as error:
        return _fail(stream, error)
    except Exception as error:
        return _fail(stream, BrimError(_out_of_memory(error) or _mistake(error)))
    return 0


def launch(module: str, name: str, order: bytes, num_processes: int, folder: str) -> int:
    """Have several processes carry out an order together, in the child, whose stdout is the first one's.

    Return 0 where its result, or the error of the one that failed first, was sent. folder: for temporary files.
    """
    from brim.distributed import launch_processes

    file = Path(folder) / "order.json"
    file.write_bytes(order)
    command = [*_PYTHON, _RANK.format(module=module, name=name), str(file), *sys.path]
    with os.fdopen(os.dup(1), "wb", buffering=0) as stream:
        try:
            ended = launch_processes(command, num_processes, folder=Path(folder))
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BrimError as error:
            return _fail(stream, error)
        for line in ended.message.splitlines():
            if line.startswith(f'{{"{_FAILED}"'):
                _write(stream, json.loads(line))
                return 0
            sys.stderr.write(f"{line}\n")
        return ended.code


def _fail(stream: IO[bytes], error: BrimError) -> int:
    """Send an error, and return 0; a process that was launched leaves it with its launcher, which sends the first."""
    kind = type(error).__name__
    told = {_FAILED: {"error": kind, "problems": [asdict(problem) for problem in error.problems]}}
    if _left(json.dumps(told), error.exit_code, follows=kind == "PeerError"):
        return error.exit_code
    _write(stream, told)
    return 0


def _left(message: str, exit_code: int, *, follows: bool = False) -> bool:
    if "WORLD_SIZE" not in os.environ:
        return False
    from brim.distributed import leave_message

    return leave_message(message, exit_code, follows=follows)


def _out_of_memory(error: Exception) -> Problem | None:
    if "torch" not in sys.modules and isinstance(error, RuntimeError):
        return None  # of no device: it is not worth the seconds in which PyTorch is imported
    from brim.batching.memory import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    what, fix = "the device, or the machine, ran out of memory", "free memory; `brim plan` shows what would help"
    return Problem(what=what, fix=fix)


def _mistake(error: Exception) -> Problem:
    from brim.config.text import mask_text

    if not _left(trace := mask_text(traceback.format_exc()), BrimError.exit_code):
        sys.stderr.write(trace)
    told = mask_text(f"{type(error).__name__}: {error}").splitlines()[0]
    return Problem(what=f"a mistake in brim or in a library: {told}", fix="see the traceback that it printed")


def signal_when_alone(number: int) -> SimpleQueue[bytes]:
    """Send this process the signal once its stdin closes, as it does when the process that started it ends.

    Return where the lines come that it reads until then.
    """
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_watch, args=(number, lines), daemon=True).start()
    return lines


def _watch(number: int, lines: SimpleQueue[bytes]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are the main thread's
    # Not sys.stdin: its lock would be held when Python ends.
    begun: list[bytes] = []
    while read := os.read(0, _READ_BYTES):
        *whole, rest = read.split(b"\n")
        for line in whole:
            lines.put(b"".join([*begun, line]))
            begun.clear()
        begun.append(rest)
    os.kill(os.getpid(), number)
