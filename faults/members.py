"""Several processes predict a data set, and are killed: members now and then, or the coordinator.

Moments are drawn from the whole time of the command, so that they start, load, plan, generate or score just then. In
the end, continued by any number of processes and by another engine where the coordinator was killed, the file must be
that of one undisturbed process, no process may be left, and no more than a lease may have been made again for each
kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults import Settings, Trial
from faults.cases import Case, trials
from faults.several import forked
from faults.subject import ROWS, make_subject

_NUMBERS = {"members-kill": 60, "members-coordinator": 20}
_ENGINES = ("slots", "static")
_LIMIT_S = 60.0
_DATA = "rows.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to happen in a trial."""

    members: int
    kills: tuple[float, ...]  # moments of members, as shares of the command's time; none: the coordinator's
    at: float  # of the coordinator
    resumed: int
    engine: str  # that continues
    seed: int

    def __str__(self) -> str:
        if self.kills:
            return f"{len(self.kills)} kills among {self.members} members at {self.kills}, seed {self.seed}"
        return f"the coordinator of {self.members} at {self.at}, continued by {self.resumed} ({self.engine})"


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    project = settings.folder / "project"
    project.mkdir()
    make_subject(project, settings.brim)
    settings.brim.call("faults.members.measure", settings.folder, folder=project)
    yield from trials(_cases(settings, random.Random(settings.seed)), settings)


def _cases(settings: Settings, chance: random.Random) -> Iterator[Case]:
    for row, number in _NUMBERS.items():
        for count in range(1 if settings.short else number):
            order = Order(
                members=chance.choice((2, 2, 3)),
                kills=tuple(round(chance.random(), 3) for _ in range(chance.choice((1, 1, 2))))
                if "kill" in row
                else (),
                at=round(chance.random(), 3),
                resumed=chance.choice((1, 2, 3)),
                engine=chance.choice(_ENGINES),
                seed=chance.randrange(1000),
            )
            folder = settings.folder / f"{row}-{count}"
            yield Case(row=row, name=str(order), judge=partial(_judged, settings, order, folder))


def _moments(chance: random.Random) -> tuple[float, ...]:
    return tuple(round(chance.random(), 3) for _ in range(chance.choice((1, 1, 2))))


def _judged(settings: Settings, order: Order, folder: Path) -> str:
    folder.mkdir()
    (folder / "order.json").write_text(json.dumps(asdict(order)))
    done = settings.brim.try_call("faults.members.disturb", folder, settings.folder, folder=settings.folder / "project")
    wrong = folder / "wrong.txt"
    return wrong.read_text() if wrong.exists() else f"exit code {done.code}: {done.err[-600:]}"


def measure(folder: str) -> None:
    """Predict by one process, and by two for the time that it takes, in a child that has the libraries."""
    _predict(Path(folder, "whole.jsonl"), 1)
    started = time.monotonic()
    with _forking([], Path(folder, "leases.txt")):
        _predict(Path(folder, "two.jsonl"), 2)
    Path(folder, "seconds.json").write_text(json.dumps(time.monotonic() - started))


def disturb(name: str, common: str) -> None:
    """Carry out an order in a child that has the libraries, and write down what was wrong."""
    folder, seconds = Path(name), json.loads(Path(common, "seconds.json").read_text())
    told = json.loads((folder / "order.json").read_text())
    order = Order(**{**told, "kills": tuple(told["kills"])})
    output, leases = folder / "p.jsonl", folder / "leases.txt"
    leases.touch()
    num_kills = (_kill_members if order.kills else _kill_coordinator)(order, output, leases, seconds)
    sizes = [int(line) for line in leases.read_text().split()]
    most = len(ROWS) + num_kills * max(sizes, default=0) * (1 if order.kills else order.members)
    wrong = ""
    if output.read_bytes() != Path(common, "whole.jsonl").read_bytes():
        wrong = "the file is not that of one process"
    elif sum(sizes) > most:
        wrong = f"{sum(sizes)} rows were generated, of {len(ROWS)}, in leases of at most {max(sizes)}"
    (folder / "wrong.txt").write_text(wrong)


def _kill_members(order: Order, output: Path, leases: Path, seconds: float) -> int:
    chance, processes, killed, is_over = random.Random(order.seed), list[Any](), list[int](), threading.Event()

    def kill() -> None:
        started = time.monotonic()
        for moment in sorted(order.kills):
            if is_over.wait(max(0.0, started + moment * seconds - time.monotonic())):
                return
            with suppress(IndexError, ProcessLookupError):
                chosen = chance.choice([each for each in processes if each.returncode is None])
                os.kill(chosen.pid, signal.SIGKILL)
                killed.append(chosen.pid)

    with _forking(processes, leases):
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            _predict(output, order.members)
        finally:
            is_over.set()
            killer.join()
    _require_gone([each.pid for each in processes])
    return len(killed)


def _kill_coordinator(order: Order, output: Path, leases: Path, seconds: float) -> int:
    pids = output.with_name("pids.txt")
    pids.touch()
    if not (coordinator := os.fork()):
        with _forking([], leases, started=lambda pid: _append(pids, pid)):
            _predict(output, order.members)
        os._exit(0)
    time.sleep(order.at * seconds)
    os.kill(coordinator, signal.SIGKILL)
    os.waitpid(coordinator, 0)
    _require_gone([int(line) for line in pids.read_text().split()])
    with _forking([], leases):
        _predict(output, order.resumed, resume=True, engine=order.engine)
    return 1


def _predict(output: Path, members: int, *, resume: bool = False, engine: str = "slots") -> None:
    import brim

    config = json.loads(Path("config.yaml").read_text()) | {"trainer": {"type": "none"}}
    del config["adapter"]
    Path(output.with_suffix(".yaml")).write_text(
        json.dumps(config | {"generation": {"max_new_tokens": 4, "engine": engine}})
    )
    model = brim.Model(output.with_suffix(".yaml"))
    model.predict(_DATA, output=output, scores=True, gpus=members, resume=resume, say=None)


def _forking(processes: list[Any], leases: Path, *, started: Callable[[int], None] = lambda pid: None) -> ExitStack:
    """Fork members from this process meanwhile, which note the sizes of their leases."""
    from brim.workflows.prediction.generation import Generation
    from brim.workflows.runs import child

    generate = Generation.run

    def noted(self: Any, prompts: Any, **how: Any) -> float:
        _append(leases, len(prompts))
        return generate(self, prompts, **how)

    def start(*arguments: Any) -> Any:
        processes.append(forked(*arguments))
        started(processes[-1].pid)
        return processes[-1]

    stack = ExitStack()
    stack.enter_context(patch.object(Generation, "run", noted))
    stack.enter_context(patch.object(child, "_process", start))
    return stack


def _append(path: Path, number: int) -> None:
    with path.open("a") as file:
        file.write(f"{number}\n")


def _require_gone(pids: list[int]) -> None:
    until = time.monotonic() + _LIMIT_S
    while left := [pid for pid in pids if _is_there(pid)]:
        if time.monotonic() > until:
            raise RuntimeError(f"processes {left} are left")
        time.sleep(0.01)


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
