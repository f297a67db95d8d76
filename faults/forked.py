"""brim in forked children of one process that has its libraries loaded: a verb costs milliseconds, and a crash, a
hang or an explosion of memory is only a child's.

    with Brim(environment={"HF_HUB_OFFLINE": "1"}) as brim:
        done = brim("check", "config.yaml", folder=project)
"""

from __future__ import annotations

import collections.abc
import contextlib
import ctypes
import gc
import io
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import brim
from brim.lazy import without_collector

ROOT = Path(__file__).parents[1]

_POLL_S = 0.004
_LONGEST_S = 300.0  # what takes a second may take a minute beside others
_PRELOADED = (  # beside all of brim
    "transformers.models.llama.modeling_llama", "transformers.generation", "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion", "datasets", "pyarrow.parquet", "pyarrow.csv",
    "tensorboardX.event_file_writer", "tensorboardX.proto.summary_pb2", "rich.progress", "numpy.ctypeslib",
    "pandas.core.methods.to_dict", "pydantic.dataclasses",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command left behind."""

    code: int  # the exit code; minus the signal that ended it
    timed_out: bool
    seconds: float
    cpu_s: float
    peak_bytes: int  # resident, with the some hundred MB of the libraries
    out: str
    err: str


class Brim:
    """Called, runs one command in a child of the process with the libraries, which the first one starts."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._environment |= {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Brim:
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        """It takes seconds to start, and ends once its stdin is closed."""
        return self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", "from faults.forked import serve; serve()"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def __call__(
        self,
        *arguments: object,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        limit_s: float = _LONGEST_S,
        limit_bytes: int = 6 << 30,
        interrupt_when: Path | None = None,
        limit_file_bytes: int | None = None,
        with_permissions: bool = False,
    ) -> Done:
        """Run `brim ARGUMENTS` in a folder. interrupt_when: send Ctrl-C once this file is there.

        limit_s: SIGKILL after so long. limit_file_bytes: no file can grow beyond. with_permissions: a folder that may
        not be written to is closed to root, too.
        """
        order = {
            "function": None,
            "arguments": [str(each) for each in arguments],
            "folder": str(folder),
            "environment": dict(environment or {}),
            "limit_s": limit_s,
            "limit_bytes": limit_bytes,
            "interrupt_when": None if interrupt_when is None else str(interrupt_when),
            "limit_file_bytes": limit_file_bytes,
            "with_permissions": with_permissions,
            "out": str(self._scratch / "out"),
            "err": str(self._scratch / "err"),
        }
        return self._done(order)

    def call(self, function: str, *arguments: object, folder: Path) -> None:
        """Call "module.function" with these as texts in a child, which has torch imported: that takes seconds here."""
        done = self.try_call(function, *arguments, folder=folder)
        if done.code != 0:
            raise RuntimeError(f"{function} failed: {done.err}")

    def try_call(self, function: str, *arguments: object, folder: Path) -> Done:
        """The same, however the child ends."""
        order = {
            "function": function,
            "arguments": [str(each) for each in arguments],
            "folder": str(folder),
            "environment": {},
            "limit_s": _LONGEST_S,
            "limit_bytes": 6 << 30,
            "interrupt_when": None,
            "limit_file_bytes": None,
            "with_permissions": False,
            "out": str(self._scratch / "out"),
            "err": str(self._scratch / "err"),
        }
        return self._done(order)

    def _done(self, order: Mapping[str, Any]) -> Done:
        assert self._process.stdin is not None, "it was opened as a pipe"
        assert self._process.stdout is not None, "it was opened as a pipe"
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks has ended")
        out, err = ((self._scratch / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return Done(**json.loads(answer), out=out, err=err)


def serve() -> None:
    """Read orders from stdin, a line each, and answer each with a line on stdout, until stdin ends."""
    with without_collector():
        for name in (*(module.name for module in pkgutil.walk_packages(brim.__path__, "brim.")), *_PRELOADED):
            import_module(name)
        _warm_up()
    gc.freeze()  # a child that collects garbage would look at all that the libraries hold, and copy the pages
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        # Pipes, since a limit on the size of files would hold for what the child says, too.
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            _become_brim(order, out=out_end, err=err_end)
        os.close(out_end)
        os.close(err_end)
        with Path(order["out"]).open("wb") as out_file, Path(order["err"]).open("wb") as err_file:
            answer = _watch(child, order, {out: out_file, err: err_file})
        os.close(out)
        os.close(err)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _warm_up() -> None:
    """Do what is done at a first use and then remembered; each child would do it again."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    values: tuple[object, ...] = (0, 0.0, "", b"", None, True, [], {}, ())
    for name in collections.abc.__all__:
        for value in values:
            isinstance(value, getattr(collections.abc, name))


def _become_brim(order: Mapping[str, Any], *, out: int, err: int) -> None:
    """In the child: run the command and end."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (for the child's whole life)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(number, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
        )
        for number in (1, 2)
    )
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (order["limit_bytes"], order["limit_bytes"]))
        os.chdir(order["folder"])
        os.environ.update(order["environment"])
        if order["limit_file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit_file_bytes"],) * 2)
        if order["with_permissions"]:
            _give_up_capabilities()
        sys.argv = ["brim", *order["arguments"]]
        code = exit_code() if order["function"] is None else _call(order["function"], order["arguments"])
    finally:
        os._exit(code)


def _give_up_capabilities() -> None:
    """Give up what lets root pass over permissions (capset(2), version 3: effective, permitted, inheritable, twice)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("the capabilities cannot be given up")


def _call(function: str, arguments: Sequence[str]) -> int:
    module, _, name = function.rpartition(".")
    try:
        getattr(import_module(module), name)(*arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def exit_code() -> int:
    """The exit code of `brim` as the interpreter would make it."""
    from brim.cli import main

    try:
        main()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _watch(child: int, order: Mapping[str, Any], heard: Mapping[int, BinaryIO]) -> dict[str, object]:
    """Wait for the child to end, or end it, and write down what it says."""
    for descriptor in heard:
        os.set_blocking(descriptor, False)
    started = time.monotonic()
    awaited, timed_out = order["interrupt_when"], False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        seconds = time.monotonic() - started
        for descriptor, file in heard.items():
            with contextlib.suppress(BlockingIOError):
                while said := os.read(descriptor, 1 << 16):
                    file.write(said)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            peak_bytes = usage.ru_maxrss * 1024
            cpu_s = usage.ru_utime + usage.ru_stime
            return {
                "code": code,
                "timed_out": timed_out,
                "seconds": seconds,
                "cpu_s": cpu_s,
                "peak_bytes": peak_bytes,
            }
        if awaited is not None and Path(awaited).exists():
            os.kill(child, signal.SIGINT)
            awaited = None
        if seconds > order["limit_s"] and not timed_out:
            os.kill(child, signal.SIGKILL)
            timed_out = True
        time.sleep(_POLL_S)
