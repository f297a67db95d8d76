"""Runs faults one after the other, in this process or shared out over several."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue

from faults import Settings, Trial
from faults.catalogue import row_names
from faults.forked import Brim
from faults.shim import build_shim

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be tried, and how."""

    names: Sequence[str]  # of modules
    short: bool
    seed: int
    worker: int = 0
    num_workers: int = 1


def judge(plan: Plan) -> Iterator[tuple[str, Trial]]:
    """Each trial of this process's part of the plan, with the name of its fault."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        library = build_shim(scratch)
        brim = stack.enter_context(Brim(environment={"LD_PRELOAD": str(library)} if library else {}))
        for name in plan.names:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                settings = Settings(
                    folder=Path(folder),
                    brim=brim,
                    short=plan.short,
                    seed=plan.seed,
                    worker=plan.worker,
                    num_workers=plan.num_workers,
                )
                for trial in import_module(f"faults.{name}").run(settings):
                    if trial.row not in row_names():
                        raise RuntimeError(f"faults/catalogue.py has no row {trial.row!r}")
                    yield name, trial


def judge_shared(plan: Plan) -> Iterator[tuple[str, Trial]]:
    """The same from `num_workers` processes, as they come. Raises RuntimeError where one of them ends badly."""
    if plan.num_workers == 1:
        yield from judge(plan)
        return
    lines: SimpleQueue[str | None] = SimpleQueue()
    processes = [_start(plan, worker) for worker in range(plan.num_workers)]
    for process in processes:
        threading.Thread(target=_listen, args=(process, lines), daemon=True).start()
    running = len(processes)
    while running:
        line = lines.get()
        if line is None:
            running -= 1
            continue
        told = json.loads(line)
        yield told.pop("fault"), Trial(**told)
    if any(process.wait() for process in processes):
        raise RuntimeError("a process of the campaign ended badly; what it said stands above")


def tell(plan: Plan) -> None:
    """What a process of several does: a line of JSON for each trial."""
    for name, trial in judge(plan):
        print(json.dumps({"fault": name, **asdict(trial)}), flush=True)


def _start(plan: Plan, worker: int) -> subprocess.Popen[str]:
    part = ["--part", f"{worker}/{plan.num_workers}", "--seed", str(plan.seed), *(["--short"] if plan.short else [])]
    only = [argument for name in plan.names for argument in ("--only", name)]
    return subprocess.Popen([sys.executable, "-m", "faults", *part, *only], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _listen(process: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    assert process.stdout is not None, "it was opened as a pipe"
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
