"""Several ranks of one run, forked from this process, which has its libraries: they cost milliseconds to start."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended."""

    code: int  # minus the signal that ended it
    result: Any = None
    error: str = ""  # the class and the text of what it raised


def together(
    num_ranks: int, work: Callable[[int], Any], *, folder: Path, limit_s: float = _LONGEST_S, ends_all: bool = True
) -> list[Ended]:
    """Call `work(rank)` in so many processes that find one another as under torchrun; return how each ended.

    ends_all: once a rank has failed the others get SIGTERM, as the launcher does it. The time limit raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_ranks)}
    children = [
        _forked(rank, work, {**environment, "LOCAL_WORLD_SIZE": str(num_ranks)}, folder) for rank in range(num_ranks)
    ]
    codes: dict[int, int] = {}
    until = time.monotonic() + limit_s
    try:
        while len(codes) < num_ranks:
            for rank, child in enumerate(children):
                if rank not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
            if time.monotonic() > until:
                raise TimeoutError(f"ranks {sorted({*range(num_ranks)} - {*codes})} still run after {limit_s:.0f} s")
            if ends_all and any(codes.values()):
                for rank in {*range(num_ranks)} - {*codes}:
                    with suppress(ProcessLookupError):
                        os.kill(children[rank], signal.SIGTERM)
                ends_all = False
            time.sleep(0.005)
    finally:
        for rank in {*range(num_ranks)} - {*codes}:
            os.kill(children[rank], signal.SIGKILL)
            os.waitpid(children[rank], 0)
    return [_ended(codes[rank], folder / f"rank-{rank}.json") for rank in range(num_ranks)]


def results(ended: Sequence[Ended]) -> list[Any]:
    """What the ranks returned; each must have ended well."""
    assert all(each.code == 0 for each in ended), "\n".join(each.error for each in ended)
    return [each.result for each in ended]


def _forked(rank: int, work: Callable[[int], Any], environment: Mapping[str, str], folder: Path) -> int:
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        told = {"result": work(rank)}
        code = 0
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        code = getattr(error, "exit_code", 1)
    finally:
        (folder / f"rank-{rank}.json").write_text(json.dumps(told))
        sys.stdout.flush()
        os._exit(code)


def _ended(code: int, file: Path) -> Ended:
    return Ended(code=code, **(json.loads(file.read_text()) if file.exists() else {}))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
