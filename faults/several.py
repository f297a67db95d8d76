"""Several ranks of one run, forked from this process, which has its libraries: they cost milliseconds to start."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_LONGEST_S = 120.0
_PATIENCE_S = 5.0  # of the launcher, with those that it has told to end
_POLL_S = 0.005
_INTERRUPTED = 130  # all of them were, and each ends by itself


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended."""

    code: int  # minus the signal that ended it
    late_s: float = 0.0  # after the first of them had ended, or was stopped
    was_stopped: bool = False  # and was killed once all others had ended
    was_told: bool = False  # it got SIGTERM, since another one had ended
    result: Any = None
    error: str = ""  # the class and the text of what it raised


def together(
    num_ranks: int, work: Callable[[int], Any], *, folder: Path, limit_s: float = _LONGEST_S, ends_all: bool = True
) -> list[Ended]:
    """Call `work(rank)` in so many processes that find one another as under torchrun; return how each ended.

    They are a process group of their own. A rank that is stopped is killed once the others have ended.
    ends_all: once a rank has failed the others get SIGTERM, and soon after SIGKILL, as the launcher does it.
    The time limit raises, and so does a process that they leave behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_ranks)}
    environment["LOCAL_WORLD_SIZE"] = str(num_ranks)
    children: list[int] = []
    for rank in range(num_ranks):
        children.append(_forked(rank, work, environment, folder, group=children[0] if children else 0))
    running, stopped, told = dict(enumerate(children)), set[int](), set[int]()
    ended: dict[int, tuple[int, float]] = {}
    until, first_s = time.monotonic() + limit_s, float("inf")
    try:
        while running:
            for rank, child in [*running.items()]:
                found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
                if not found:
                    continue
                if os.WIFSTOPPED(status):
                    stopped.add(rank)
                else:
                    ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
                    del running[rank]
                if os.WIFSTOPPED(status) or ended[rank][0]:
                    first_s = min(first_s, time.monotonic())
            if time.monotonic() > until:
                raise TimeoutError(f"ranks {sorted(running)} still run after {limit_s:.0f} s")
            if ends_all and not told and any(code not in (0, _INTERRUPTED) for code, _ in ended.values()):
                told = {*running}
                _signal(running, signal.SIGTERM)
            if (told and time.monotonic() > first_s + _PATIENCE_S) or {*running} <= stopped:
                _signal(running, signal.SIGKILL)
            time.sleep(_POLL_S)
        left = _left(children[0])
    finally:
        _left(children[0])
        for child in running.values():
            os.waitpid(child, 0)
    if left:
        raise RuntimeError(f"process group {children[0]} still had processes when all ranks had ended")
    return [
        Ended(
            code=code,
            late_s=max(0.0, at_s - first_s),
            was_stopped=rank in stopped,
            was_told=rank in told,
            **_said(folder / f"rank-{rank}.json"),
        )
        for rank, (code, at_s) in sorted(ended.items())
    ]


def _signal(running: Mapping[int, int], number: signal.Signals) -> None:
    for child in running.values():
        with suppress(ProcessLookupError):
            os.kill(child, number)


def _left(group: int) -> bool:
    """Kill what is left of a process group; return whether anything was."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def results(ended: Sequence[Ended]) -> list[Any]:
    """What the ranks returned; each must have ended well."""
    assert all(each.code == 0 for each in ended), "\n".join(each.error for each in ended)
    return [each.result for each in ended]


def _forked(rank: int, work: Callable[[int], Any], environment: Mapping[str, str], folder: Path, *, group: int) -> int:
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    child = os.fork()
    with suppress(PermissionError, ProcessLookupError):  # the group of those that have ended already
        os.setpgid(child, group)
    if child:
        return child
    code = 1
    gc.freeze()  # to collect garbage would be to look at all that the parent's libraries hold, and to copy the pages
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        told = {"result": work(rank)}
        code = 0
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        code = getattr(error, "exit_code", 1)
    finally:
        whole = folder / f"rank-{rank}.json"  # or it is not there: this process may be killed meanwhile
        whole.with_suffix(".tmp").write_text(json.dumps(told))
        whole.with_suffix(".tmp").rename(whole)
        sys.stdout.flush()
        os._exit(code)


def _said(file: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return said


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def forked(
    function: Any, log: Path | None, environment: Any, when_alone: Any, num_processes: int, folder: Any
) -> Forked:
    """Stand for `child._process`: fork the process from this one, which has the libraries and what a test changed.

    It costs milliseconds to start, not the seconds of an interpreter that imports them.
    """
    from brim.workflows.runs.serving import messages, serve, signal_when_alone

    (order, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads, which do nothing here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for descriptor, number in ((order, 0), (to_parent, 1)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)  # or a brother would hold its stdin open
            if log is not None:
                sys.stdout = sys.stderr = log.open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
            os.environ.update(environment)
            with open(0, "rb", 0, closefd=False) as lines:
                line = lines.readline()
            heard, told = signal_when_alone(when_alone), messages()
            if num_processes == 1:
                code = serve(function, line, told, heard)
            else:
                together(num_processes, lambda rank: serve(function, line, told), folder=Path(folder))
                code = 0
        finally:
            os._exit(code)
    os.close(order)
    os.close(to_parent)
    return Forked(child, stdin=os.fdopen(to_child, "wb", 0), stdout=os.fdopen(from_child, "rb", 0))


class Forked(SimpleNamespace):
    """Has what `Child` uses of a Popen."""

    returncode: int | None = None

    def __init__(self, pid: int, **pipes: Any) -> None:
        super().__init__(pid=pid, **pipes)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
