"""The faults of `faults.ranks` in processes that torchrun has started, each with an interpreter of its own.

torchrun ends the others once one has failed, and kills after half a minute what does not end then. The run is continued
by forked ranks, which the other fault tries.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from faults import Settings, Trial
from faults.cases import Case, Skip, trials
from faults.ranks import PEER_SAID, TIMEOUT_S, TRAIN, Order, Runs, armed

NUM_TRIALS = 60
_DOES = ("kill", "kill", "stop", "once", "always", "SIGTERM")
_ROW = "torchrun"
_LONGEST_S = 240.0
ORDER = "FAULT_ORDER"  # in the environment of all processes of a trial


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's; none in the short form, of which each takes a minute."""
    if settings.short:
        yield from trials([Case(row=_ROW, name="all", judge=_too_long)], settings)
        return
    yield from trials(_cases(Runs(settings)), settings)


def _cases(runs: Runs) -> Iterator[Case]:
    for _ in range(NUM_TRIALS):
        order = replace(runs.drawn(_DOES), ends_all=True)
        yield Case(row=_ROW, name=str(order), judge=partial(_judged, order, runs))


def _judged(order: Order, runs: Runs) -> str:
    folder = runs.new_folder()
    return _launched(order, runs.project, folder) or runs.continued(order, folder)


def _launched(order: Order, project: Path, folder: Path) -> str:
    """What is wrong with how processes end that torchrun has started."""
    (folder / "tmp").mkdir()
    mark = json.dumps({**asdict(order), "folder": str(folder)})
    environment = {**os.environ, ORDER: mark, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    environment |= {"BRIM_PEER_TIMEOUT_S": str(TIMEOUT_S), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    elastic = ("--nproc-per-node", str(order.ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, "-m", __name__, *TRAIN, str(folder / "run")]
    with (folder / "said").open("wb") as said:
        done = subprocess.Popen(command, cwd=project, env=environment, stdout=said, stderr=said)
        until = time.monotonic() + _LONGEST_S
        while done.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
    time.sleep(1.0)
    left = _with_environment(mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    text = (folder / "said").read_text(errors="replace")
    happened = (folder / "happened").exists()
    wrong = ""
    if left or done.returncode is None:
        wrong = f"processes are left: {len(left)}"
    elif not happened:
        wrong = "nothing happened"
    elif (done.returncode == 0) != (order.does == "once"):
        wrong = f"exit code {done.returncode}"
    elif "bug in brim" in text:
        wrong = "a traceback"
    elif order.does == "always" and "ran out of memory" not in text:
        wrong = "no message"
    elif order.does == "stop" and not any(each in text for each in PEER_SAID):
        wrong = "no rank says that another one failed"
    return wrong and f"{wrong}: …{text[-800:]}"


def _with_environment(mark: str) -> list[int]:
    """The processes, by id, whose environment has this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{ORDER}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _too_long() -> str:
    raise Skip("takes a minute")


def main() -> None:
    """Be a rank that torchrun has started: `brim` with the order of the environment."""
    told = json.loads(os.environ[ORDER])
    folder = Path(told.pop("folder"))
    order = Order(**told)
    armed(order if int(os.environ["RANK"]) == order.rank else None, below=folder)
    from brim.cli import main as brim

    brim()


if __name__ == "__main__":
    main()
