"""Carry out an order in a child process: hear, tell, and say how it failed. See `child`, which starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Protocol

from brim.errors import BrimError, Problem


class Tell(Protocol):
    """Send messages to the process that started a child, or hear what that one sends; its function is given one."""

    def __call__(self, **message: Any) -> None: ...

    def hear(self) -> dict[str, Any]:
        """Wait for the next message."""
        ...


SIGNALS = (signal.SIGINT, signal.SIGTERM)

READ_BYTES = 1 << 16

FAILED = "failed"  # the key of the message on an error

PYTHON = (sys.executable, "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", "-c")

# With this process's path: `-m` would put the current folder first, where the user may have a file named `json.py`.
START = "import sys; order = {order}; sys.path[:] = sys.argv[2:]\n"

SERVE = (  # which catches Ctrl-C: to import takes seconds
    "def call(order, tell):\n"
    "    from {module} import {name}\n"
    "    return {name}(order, tell)\n"
    "sys.exit(serve(call, order, told, heard))"
)

_INTERRUPTED = 130

_RANK = (
    START.format(order="open(sys.argv[1], encoding='utf-8').read()")
    + "from brim.distributed import watch_parent; watch_parent()\n"
    + "from brim.workflows.runs.serving import messages, serve; told, heard = messages(), None\n"
    + SERVE
)


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
        write(self._stream, message)

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
    command = [*PYTHON, _RANK.format(module=module, name=name), str(file), *sys.path]
    with os.fdopen(os.dup(1), "wb", buffering=0) as stream:
        try:
            ended = launch_processes(command, num_processes, folder=Path(folder))
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BrimError as error:
            return _fail(stream, error)
        for line in ended.message.splitlines():
            if line.startswith(f'{{"{FAILED}"'):
                write(stream, json.loads(line))
                return 0
            sys.stderr.write(f"{line}\n")
        return ended.code


def _fail(stream: IO[bytes], error: BrimError) -> int:
    """Send an error, and return 0; a process that was launched leaves it with its launcher, which sends the first."""
    kind = type(error).__name__
    told = {FAILED: {"error": kind, "problems": [asdict(problem) for problem in error.problems]}}
    if _left(json.dumps(told), error.exit_code, follows=kind == "PeerError"):
        return error.exit_code
    write(stream, told)
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
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they are the main thread's
    # Not sys.stdin: its lock would be held when Python ends.
    begun: list[bytes] = []
    while read := os.read(0, READ_BYTES):
        *whole, rest = read.split(b"\n")
        for line in whole:
            lines.put(b"".join([*begun, line]))
            begun.clear()
        begun.append(rest)
    os.kill(os.getpid(), number)


def write(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write a line to an unbuffered stream: a signal's handler cannot write to a buffered one that is being written.

    Where nobody reads any more, the other process has ended, and this one will see that without it.
    """
    line = json.dumps(message).encode() + b"\n"
    with suppress(BrokenPipeError):
        while line:  # a signal may cut a write short
            line = line[stream.write(line) :]
