"""Try cases in forks of this process, each contender in its own, under a real limit of its address space.

    python -m benchmarks.search_worker '{"seed": …}'

What is imported and set up at first use is there before any fork, so that a case costs seconds. Each case is appended
to the file of results as a line of JSON when it is done.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.search_contenders import MOST, STEPS, Contender, Oracle, Watched, contenders
from benchmarks.search_oracle import Foretold, aimed_at, foretell
from benchmarks.search_subject import Case, Subject, random_case, subject
from brim.batching.memory import free_caches, is_out_of_memory

_STATUS = Path("/proc/self/status")
_MOST_S = 100  # for a search; Lightning's never ends where as many rows as there are run out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Hold what a worker is to do."""

    seed: str
    numbers: Sequence[int]
    only: Sequence[str]  # contenders; none: all
    constant_bytes: int | None  # of the calibration; None: this is the calibration
    margin_bytes: int
    results: str  # a file


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _rehearse()
    gc.collect()
    gc.freeze()  # what is imported is not looked at again each time that garbage is collected
    for number in work.numbers:
        case = random_case(number, work.seed)
        found = forked(partial(_case, case, work))
        with Path(work.results).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": asdict(case), **found}) + "\n")


def forked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what it returns in a child process; {"error": …} where it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            told = run()
        except BaseException:
            told = {"error": traceback.format_exc()}
        with suppress(OSError), os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(told))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the process was ended"}


def _case(case: Case, work: Work) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        built = subject(case, Path(name))
        free_caches()
        before_bytes = _status_bytes("VmSize")
        told = forked(lambda: _foretold(built, case))
        if "error" in told:
            return told
        foretold = Foretold.from_dict(told["foretold"])
        if work.constant_bytes is None:
            return told | forked(lambda: _beyond(built, foretold, case.room_bytes, before_bytes))
        oracle = Oracle(
            bytes_of=aimed_at(foretold, before_bytes, work.constant_bytes),
            limit_bytes=before_bytes + case.room_bytes,
            margin_bytes=work.margin_bytes,
        )
        found = {
            name: forked(partial(_found, way, built, oracle))
            for name, way in contenders().items()
            if not work.only or name in work.only
        }
        return told | {"largest": _largest(built, foretold, case.room_bytes, oracle.limit_bytes), "found": found}


def _foretold(built: Subject, case: Case) -> dict[str, Any]:
    started = time.perf_counter()
    foretold = foretell(built, room_bytes=case.room_bytes, most_rows=MOST)
    return {"foretold": foretold.as_dict(), "foretold_s": time.perf_counter() - started}


def _beyond(built: Subject, foretold: Foretold, room_bytes: int, before_bytes: int) -> dict[str, Any]:
    """Return how much more a step takes than was foretold, without a limit."""
    rows = _most_rows(foretold, room_bytes)
    for _ in range(STEPS):
        built.step(rows)
    return {"rows": rows, "beyond_bytes": _status_bytes("VmPeak") - before_bytes - round(foretold(rows))}


def _found(way: Contender, built: Subject, oracle: Oracle) -> dict[str, Any]:
    """Return what one contender answers, and what it took."""
    _limit(oracle.limit_bytes)
    watched = Watched(built)
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(_MOST_S)
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            told: dict[str, Any] = {"size": way(watched, oracle, built.folder.path)}
        except _TimeUp:
            told = {"size": None, "error": f"not done in {_MOST_S} s"}
        except Exception as error:  # a peer's failure is a result
            told = {"size": None, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    seconds = time.perf_counter() - started
    return {**told, "tried": watched.sizes, "out_of_memory": watched.failed, "seconds": round(seconds, 3)}


class _TimeUp(BaseException):
    """Not to be caught by who is late."""


def _time_is_up(number: int, frame: Any) -> None:
    raise _TimeUp


def _largest(built: Subject, foretold: Foretold, room_bytes: int, limit_bytes: int) -> int:
    """Return the largest size that a fresh process runs under the limit, found by trying; the next two do not run."""

    @cache
    def fits(rows: int) -> bool:
        return rows < 1 or (rows <= MOST and bool(forked(lambda: _ran(built, rows, limit_bytes))["ran"]))

    low = _most_rows(foretold, room_bytes)
    reach = 1
    while not fits(low):
        low, reach = max(0, low - reach), 2 * reach
    high, reach = low + 1, 1
    while fits(high):
        low, high, reach = high, high + 2 * reach, 2 * reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    while fits(low + 1) or fits(low + 2):  # not monotone
        low += 1 if fits(low + 1) else 2
    return low


def _ran(built: Subject, rows: int, limit_bytes: int) -> dict[str, Any]:
    _limit(limit_bytes)
    try:
        for _ in range(STEPS):
            built.step(rows)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"ran": False}
    return {"ran": True}


def _most_rows(foretold: Foretold, room_bytes: int) -> int:
    return max((rows for rows in range(1, MOST + 1) if foretold(rows) <= room_bytes), default=1)


def _limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "every Linux has it"
    return int(found[1]) * 1024


def _rehearse() -> None:
    """Import and set up what the first use of each contender would, and let MKL take its buffers."""
    large = Case(
        number=0,
        model_type="llama",
        hidden=192,
        layers=2,
        heads=4,
        vocabulary=2048,
        tokens=160,
        room_bytes=2**26,
    )
    for model_type in ("llama", "qwen3", "gpt2"):
        with tempfile.TemporaryDirectory() as name:
            built = subject(replace(large, model_type=model_type), Path(name))
            built.step(8)
    small = replace(large, hidden=32, vocabulary=64, tokens=8)
    with tempfile.TemporaryDirectory() as name:
        built = subject(small, Path(name))
        foretold = foretell(built, room_bytes=2**26, most_rows=MOST)
        oracle = Oracle(bytes_of=foretold, limit_bytes=2**40, margin_bytes=0)
        for way in contenders().values():
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                way(Watched(built), oracle, Path(name))


if __name__ == "__main__":
    main()
