"""Start the processes of a run on this machine, one a GPU, and end all of them once one has failed.

A launcher, be it this one, torchrun or Slurm's srun, tells each process its place in RANK, LOCAL_RANK and WORLD_SIZE.
This one lets PyTorch's elastic launcher start the processes, as torchrun does, and watches them itself: torchrun takes
the first one that Ctrl-C has ended for a failure, waits half a minute for one that hangs, and prints tracebacks and a
table around what the failed process has to say.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, InputError, Problem
from brim.storage import scratch_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

_INTERRUPTED = 130

_STOPPED = Problem(what="interrupted")

_POLL_S = 0.1

_SEEN_AFTER_S = 1.0  # the most that passes between a crash and the moment when it is seen

_SAVING_S = 600.0  # for the others to end, once one was interrupted or the first is done

_MOST_ASKED = 2  # Ctrl-C: the step is saved; again: it is not; once more: nobody is asked

_PARENT_S = 1.0

_LAUNCHER = "BRIM_LAUNCHER"  # the id of the process that launched, in its workers' environment

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where a worker of PyTorch's launchers may leave its error

_PR_SET_PDEATHSIG = 1  # Linux' <sys/prctl.h>

_MOST_ON_FEW_CORES = 8  # processes, to try out what will run on GPUs

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SIGNALS_OF_TORCH = (*_SIGNALS, signal.SIGHUP, signal.SIGQUIT)  # it handles them from the start of the workers on


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Say which of a run's processes this one is."""

    rank: int = 0
    local_rank: int = 0  # on its machine: the number of its GPU
    world_size: int = 1  # processes of the run
    local_world_size: int = 1  # those on this machine
    is_launched: bool = False  # a launcher has said so

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the run's files and its screen."""
        return self.rank == 0

    def lone_notes(self, num_workers: int | None) -> tuple[str, ...]:
        """Say that this process trains alone, where more were asked for: only a launcher starts others."""
        if self.is_launched or num_workers in (None, 1):
            return ()
        told = "one process trains here; `brim train` starts as many, and so does torchrun"
        return (f"backend.trainer.num_workers: {num_workers} has no effect: {told}",)

    @classmethod
    def of_environment(cls) -> Place:
        """Return the place that a launcher set; alone where there is no WORLD_SIZE.

        A launcher that does not set LOCAL_WORLD_SIZE has all processes counted as this machine's, so that its memory is
        rather divided among too many. Raises InputError for what is missing or cannot be.
        """
        if not os.environ.get("WORLD_SIZE"):
            return cls()
        world_size = _number("WORLD_SIZE", least=1)
        if world_size == 1:
            return cls(is_launched=True)
        local_world_size = world_size
        if os.environ.get("LOCAL_WORLD_SIZE"):
            local_world_size = _number("LOCAL_WORLD_SIZE", least=1, most=world_size)
        return cls(
            rank=_number("RANK", most=world_size - 1),
            local_rank=_number("LOCAL_RANK", most=local_world_size - 1),
            world_size=world_size,
            local_world_size=local_world_size,
            is_launched=True,
        )


def _number(name: str, *, least: int = 0, most: int | None = None) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    size = os.environ["WORLD_SIZE"]
    up_to = "" if most is None else f" and at most {most:,}"
    raise InputError(
        what=f"{name} is {text!r}" if text else f"{name} is not set, but WORLD_SIZE={size} is",
        where="environment",
        expected=f"a whole number of at least {least}{up_to}",
        fix="start the processes by torchrun, which sets RANK, LOCAL_RANK and WORLD_SIZE; or unset WORLD_SIZE and use "
        "`brim train … --gpus N`",
    )


def num_processes(gpus: str | None, num_workers: int | None, *, is_here: bool = True) -> int:
    """Return how many processes to start on this machine, one a GPU; without GPUs, as many as were asked for.

    gpus: of the command line: a number or "all"; it wins over num_workers, the configuration's. is_here: else a number
    is of another machine, and is not compared with what is there.
    Raises InputError where there are fewer GPUs; for "all" where there is none; and there, where far more are asked for
    than cores would do any good.
    """
    asked = None if gpus == "all" else num_workers or 1 if gpus is None else int(gpus) if gpus.isdecimal() else 0
    if asked == 0:
        expected = "a whole number of at least 1, or all"
        raise InputError(what=f"--gpus is {gpus!r}", where="command line", expected=expected)
    if asked == 1 or (asked is not None and not is_here):
        return asked
    import torch

    there = torch.cuda.device_count()
    if asked is None and not there:
        what, fix = "PyTorch finds no GPU", "say how many processes are to share the CPU, such as --gpus 2"
        raise InputError(what=what, where="--gpus all", fix=fix)
    where = "backend.trainer.num_workers" if gpus is None else "--gpus"
    if asked is not None and 0 < there < asked:
        what = f"{asked:,} GPUs are asked for, but PyTorch finds {there:,}"
        raise InputError(what=what, where=where, expected=f"at most {there:,}", fix="set that, or --gpus all")
    most = max(_MOST_ON_FEW_CORES, os.cpu_count() or 1)
    if asked is not None and not there and asked > most:
        what = f"{asked:,} are asked for, but PyTorch finds no GPU, and so many processes would crowd the memory"
        raise InputError(what=what, where=where, expected=f"at most {most:,} on this CPU")
    return asked or there


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Say how a launched command ended."""

    code: int  # of the process that failed first; 0 if none did
    message: str = ""  # what that one said, where it is not on the screen yet


def launch_processes(
    command: Sequence[str], num_workers: int, *, patience_s: float = 5.0, folder: Path | None = None
) -> Launched:
    """Run a command in several processes of this machine, and wait for their end. For the main thread alone.

    The first one has this process's stdin, stdout and stderr; of the others, only the failure is told. Ctrl-C and
    SIGTERM are passed on, as Ctrl-C; a third one kills. Where one process fails, the others are told to end, and killed
    after patience_s; where one was interrupted, they have more time: a checkpoint is written then.

    command: a program and its arguments. folder: for temporary files; default: the system's. Raises BrimError if a
    signal ended the process that failed first, and KeyboardInterrupt if all were interrupted and none said so.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)  # what is told here
    with ExitStack() as stack:
        logs = stack.enter_context(scratch_folder("brim-launch-", within=folder))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = {number: signal.getsignal(number) for number in _SIGNALS_OF_TORCH}
        try:
            workers = start_processes(
                name="brim",
                entrypoint=command[0],
                args=dict.fromkeys(range(num_workers), tuple(command[1:])),
                envs={rank: _environment(rank, num_workers, store.port) for rank in range(num_workers)},
                logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, num_workers), Std.ALL)),
            )
            assert isinstance(workers, SubprocessContext), "they run a program, not a function"
            stack.callback(_close, workers)
            with _passed_on(workers, before):
                ended = _wait(workers, patience_s)
        except SignalException:  # before all were started
            raise KeyboardInterrupt(_STOPPED) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return _launched(workers, ended)


def _close(workers: SubprocessContext) -> None:
    """Kill who still runs, and close the files of their output: PyTorch does so for those alone that it kills."""
    workers.close(signal.SIGKILL)
    for handler in workers.subprocess_handlers.values():
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()


def _environment(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Return what torchrun would set: its store is here, so that no worker's end takes it away from the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // num_workers)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "brim",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _LAUNCHER: str(os.getpid()),
    }


@contextmanager
def _passed_on(workers: SubprocessContext, before: Mapping[signal.Signals, object]) -> Iterator[None]:
    """Pass Ctrl-C and SIGTERM on to the workers. Each is in a session of its own, where no terminal reaches it.

    before: the handlers of other signals, which PyTorch has replaced.
    """
    num_asked = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > _MOST_ASKED:
            raise KeyboardInterrupt(_STOPPED)
        for handler in workers.subprocess_handlers.values():
            handler.proc.send_signal(signal.SIGINT)

    for number, handler in before.items():
        signal.signal(number, pass_on if number in _SIGNALS else handler)  # type: ignore[arg-type]
    yield


@dataclass(frozen=True, slots=True)
class _Ended:
    """Say how a worker ended."""

    rank: int
    code: int  # minus the signal where one ended it
    seen_s: float  # the time when that was seen
    was_told: bool  # it was told to end before
    hung: bool = False  # and did not
    follows: bool = False  # its message says that another one has failed


def _wait(workers: SubprocessContext, patience_s: float) -> list[_Ended]:
    """Return how each worker ended, once all have or the time to do so is over."""
    running = {rank: handler.proc for rank, handler in workers.subprocess_handlers.items()}
    ended: list[_Ended] = []
    deadline, has_failed, are_told = float("inf"), False, False
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        codes = {rank: code for rank, process in running.items() if (code := process.poll()) is not None}
        for rank, code in codes.items():
            code = _INTERRUPTED if code == -signal.SIGINT else code
            follows = any(line.get("follows") for line in _left(Path(workers.error_files[rank])))
            ended.append(_Ended(rank, code, time.time(), are_told, follows=follows))
            del running[rank]
        failed = [each for each in ended if each.code not in (0, _INTERRUPTED)]
        if failed and not has_failed:
            has_failed, deadline = True, time.monotonic() + patience_s
        if not are_told and not all(each.follows for each in failed):  # the one they follow has yet to say why
            are_told = True
            for rank in running:
                workers.subprocess_handlers[rank].close(signal.SIGTERM)
        if deadline == float("inf") and any(each.code == _INTERRUPTED or each.rank == 0 for each in ended):
            deadline = time.monotonic() + _SAVING_S
    return ended + [_Ended(rank, -signal.SIGKILL, time.time(), True, hung=True) for rank in running]


def _launched(workers: SubprocessContext, ended: Sequence[_Ended]) -> Launched:
    """Tell how the worker ended that failed first."""
    failed = [each for each in ended if each.code]
    if not failed:
        return Launched(code=0)
    first = min(failed, key=lambda each: _order(each, Path(workers.error_files[each.rank])))
    if first.code == _INTERRUPTED:  # all were, and the first process knows what was saved
        first = min((each for each in failed if each.code == _INTERRUPTED), key=lambda each: each.rank)
    if (left := Path(workers.error_files[first.rank])).exists():
        lines = _left(left)
        return Launched(code=lines[-1]["exit_code"], message="\n".join(line["message"] for line in lines))
    said = _last_lines(workers.stderrs[first.rank])
    if first.code == _INTERRUPTED:
        raise KeyboardInterrupt(_STOPPED)
    if first.code > 0:
        return Launched(code=first.code, message=said)
    raise _killed(first, len(ended), said)


def _left(file: Path) -> list[dict[str, Any]]:
    """Return the messages that a worker has left, with their exit codes."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _killed(ended: _Ended, num_workers: int, said: str) -> BrimError:
    how = "did not end, and was killed" if ended.hung else f"was ended by {signal.Signals(-ended.code).name}"
    if ended.code == -signal.SIGKILL and not ended.hung:
        how += "; the system kills what takes too much memory"
    return BrimError(
        what=f"the process of rank {ended.rank}, of {num_workers}, {how}" + (f"; it said: {said}" if said else ""),
        fix="the same command with --resume goes on from the last checkpoint",
    )


def _order(ended: _Ended, left: Path) -> tuple[int, float]:
    """Return what sorts the workers that failed: causes before consequences. left: the message, if there is one.

    Who misses another one fails, too, and says so, perhaps before that one has left its message, since that waits for
    the others to hear of it. PyTorch aborts a process whose collective does not end, much later.
    """
    if left.exists():
        return 2 if ended.follows else 1, left.stat().st_mtime
    if ended.was_told:
        return 3, 0
    return int(ended.code > 0 or -ended.code in (signal.SIGTERM, signal.SIGABRT)), ended.seen_s - _SEEN_AFTER_S


_MOST_LINES = 20


def _last_lines(file: str) -> str:
    """Return the end of a worker's stderr; nothing for the first one's, which is this process's."""
    if not file:
        return ""
    return "\n".join(Path(file).read_text(encoding="utf-8", errors="replace").splitlines()[-_MOST_LINES:])


def leave_message(message: str, exit_code: int, *, follows: bool = False) -> bool:
    """Leave what a worker fails with for the launcher, which shows the first. Return False without one of this module.

    The exit code, too: PyTorch's threads may abort a process that ends without having left its group.
    follows: the message says that another worker has failed; so it is shown where no other one is.
    """
    if _LAUNCHER not in os.environ or not os.environ.get(_ERROR_FILE):
        return False
    with Path(os.environ[_ERROR_FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"message": message, "exit_code": exit_code, "follows": follows}) + "\n")
    return True


def watch_parent() -> None:
    """Kill this process once the launcher that started it is gone: nobody would end it. Only of PyTorch's launchers.

    Linux does that itself, even to a process that is stopped; elsewhere a thread looks.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(_LAUNCHER, os.getppid()))
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are the main thread's
    while os.getppid() == launcher:
        time.sleep(_PARENT_S)
    os.kill(os.getpid(), signal.SIGKILL)
