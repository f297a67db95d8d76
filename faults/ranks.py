"""Several processes train one run, and something happens to one of them, or to all.

At a moment that the seed draws, a rank is killed or stopped, runs out of memory, or all are interrupted. A moment is a
number among what that rank does: passes through the model, sums, messages; or among the first rank's operations on
files. Then every rank must have ended in time, each with its own message or one that names the other; no process and no
lock may be left; and the run, continued by any number of ranks, must be that of one undisturbed process.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults import Settings, Trial
from faults.cases import Case, Skip, trials
from faults.forked import exit_code
from faults.several import Ended, together
from faults.shim import Operation, read_log, watch
from faults.subject import make_subject

_NUMBERS = {"ranks-kill": 80, "ranks-first": 60, "ranks-stop": 30, "ranks-memory": 40, "ranks-interrupt": 30}
_DOES = {
    "ranks-kill": ["kill"],
    "ranks-first": ["file"],
    "ranks-stop": ["stop"],
    "ranks-memory": ["once", "always"],
    "ranks-interrupt": ["SIGINT", "SIGTERM"],
}
_TWICE, _ENDS_ALL = 0.3, 0.5  # the shares of trials
TRAIN = ("train", "config.yaml", "trainer.dropout_by_row=true", "trainer.learning_rate=0.01",
         "trainer.validation_metric=loss", "--output-directory")  # fmt: skip
TIMEOUT_S = 8.0  # of a rank that does not answer
PEER_SAID = ("failed, so this process ends", "another process of the run ended, or did not", "not shown a sign of life")
_GRACE_S = 15.0
_SOON_S = 10.0  # where the launcher ends all
_WITHIN = 1e-5  # of the losses, relative; fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to happen in a trial. It travels as JSON to the process that forks the ranks."""

    ranks: int
    does: str  # kill, stop, once (out of memory), always (from then on), SIGINT, SIGTERM (to all), file
    rank: int  # to which
    at: int  # its moment, from 1; an operation on a file with `file`
    resumed: int  # ranks that continue the run
    is_twice: bool = False  # interrupted: once more, a moment later
    ends_all: bool = False  # the launcher ends the others, as torchrun does; Slurm may not

    def __str__(self) -> str:
        return f"{self.does} at moment {self.at} of rank {self.rank} of {self.ranks}, resumed by {self.resumed}" + (
            "".join(
                [", twice" * (self.is_twice and self.does.startswith("SIG")), ", the launcher ends all" * self.ends_all]
            )
        )


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    yield from trials(_cases(Runs(settings), settings), settings)


def _cases(runs: Runs, settings: Settings) -> Iterator[Case]:
    """In an order that does not depend on which of them are done."""
    for row, number in _NUMBERS.items():
        for _ in range(1 if settings.short else number):
            if row == "ranks-first" and not runs.operations:
                yield Case(row=row, name="all", judge=_no_shim)
                break
            order = runs.drawn(_DOES[row])
            yield Case(row=row, name=str(order), judge=partial(runs.forked, order))


class Runs:
    """Make runs in several processes from one project, and compare them with the one that nobody disturbed."""

    def __init__(self, settings: Settings) -> None:
        self._brim, self._folder = settings.brim, settings.folder
        self.project, self._whole = settings.folder / "project", settings.folder / "whole"
        self._chance, self._number = random.Random(settings.seed), 0
        self._ranks = (2,) if settings.short else (2, 2, 2, 4)
        self.project.mkdir()
        make_subject(self.project, settings.brim)
        if wrong := self._call("measure", self._whole, *sorted({1, *self._ranks})):
            raise RuntimeError(f"runs that nobody disturbed: {wrong}")
        self._moments = json.loads((self._whole / "moments.json").read_text())
        log = self._whole / "operations.log"
        self.operations = read_log(log, self._whole / "2") if log.exists() else []

    def drawn(self, does: Sequence[str]) -> Order:
        """Draw what is to happen in a trial, when and to which rank."""
        chance = self._chance
        ranks = chance.choice(self._ranks)
        order = Order(
            ranks=ranks,
            does=chance.choice(does),
            rank=chance.randrange(ranks),
            at=0,
            resumed=chance.choice((1, 2, 4)),
            is_twice=chance.random() < _TWICE,
            ends_all=chance.random() < _ENDS_ALL,
        )
        if order.does == "file":
            return replace(order, ranks=2, rank=0, at=_operation(self.operations, chance).number)
        return replace(order, at=chance.randint(1, len(_among(order, self._moments[str(ranks)][order.rank]))))

    def forked(self, order: Order) -> str:
        """Disturb a run of forked ranks and continue it; return what was wrong."""
        folder = self.new_folder()
        return self._call("disturb", folder, json.dumps(asdict(order))) or self.continued(order, folder)

    def continued(self, order: Order, folder: Path) -> str:
        """Continue a run that was disturbed; return what is not as in the undisturbed one."""
        wrong = self._call("resume", folder, str(order.resumed), self._whole / "1")
        if not wrong:
            shutil.rmtree(folder)
        return wrong

    def new_folder(self) -> Path:
        """Make the folder of a trial."""
        self._number += 1
        folder = self._folder / f"trial-{self._number}"
        folder.mkdir()
        return folder

    def _call(self, function: str, *arguments: object) -> str:
        """Call a function of this module in a child that has the libraries; return what was wrong."""
        done = self._brim.try_call(f"{__name__}.{function}", self.project, *arguments, folder=self.project)
        return "" if done.code == 0 else done.err.strip()[-1500:] or f"exit code {done.code}"


def _operation(operations: Sequence[Operation], chance: random.Random) -> Operation:
    """Draw an operation: of the rows, a checkpoint, the model or another file, each as often."""
    groups: dict[str, list[Operation]] = {}
    for each in operations:
        first, *rest = Path(each.path).parts or (".",)
        kind = first if first == "tmp" or not rest else rest[0].lstrip(".").partition(".")[0]
        groups.setdefault(kind if kind in ("tmp", "checkpoints", "model") else "other", []).append(each)
    return chance.choice(groups[chance.choice(sorted(groups))])


def _among(order: Order, names: Sequence[str]) -> list[str]:
    return [name for name in names if name == "pass" or order.does not in ("once", "always")]


# What the children of the process with the libraries do: each raises what is wrong.


def measure(project: str, folder: str, *numbers: str) -> None:
    """Train undisturbed with so many ranks, 1 first; write down each one's moments, and operations of the first."""
    whole = Path(folder)
    whole.mkdir()
    moments = {}
    for ranks in map(int, numbers):
        here = whole / str(ranks)
        here.mkdir()
        environment = {0: watch(here, log=whole / "operations.log")} if ranks == 2 else {}
        _require_well(_train(project, here, ranks, environment=environment))
        moments[ranks] = [json.loads((here / f"moments-{rank}.json").read_text()) for rank in range(ranks)]
        _require_alike(here / "run", whole / "1" / "run")
    (whole / "moments.json").write_text(json.dumps(moments))


def disturb(project: str, folder: str, order: str) -> None:
    """Train until it happens, and see how all end."""
    wanted, here = Order(**json.loads(order)), Path(folder)
    ended = _train(project, here, wanted.ranks, order=wanted)
    while wanted.does == "file" and ended[0].code == 0 and wanted.at > 1:  # how often logs are written is chance
        wanted = replace(wanted, at=wanted.at - 1)
        shutil.rmtree(here)
        here.mkdir()
        ended = _train(project, here, wanted.ranks, order=wanted)
    said = [(here / f"said-{rank}").read_text(errors="replace") for rank in range(wanted.ranks)]
    wrong = [each for rank in range(wanted.ranks) if (each := _badly_ended(wanted, rank, ended[rank], said[rank]))]
    if (here / "run").is_dir():
        _require_unlocked(here / "run")
    victim = wanted.does in ("kill", "stop", "file") and wanted.rank == 0
    left = [] if victim else sorted(path.name for path in (here / "tmp").iterdir())
    if left:
        wrong.append(f"left in the folder of temporary files: {left}")
    if wanted.does == "always" and not _is_saved(said[wanted.rank], here / "run"):
        wrong.append(f"the checkpoint is not there: {said[wanted.rank][-300:]}")
    if wanted.does != "file" and not (here / "happened").exists():
        wrong.append("nothing happened")
    if wrong:
        raise AssertionError("; ".join(wrong))


def resume(project: str, folder: str, ranks: str, whole: str) -> None:
    """Continue a run with so many ranks, and compare it with the undisturbed one."""
    here = Path(folder)
    _require_well(_train(project, here, int(ranks), "--resume"))
    _require_alike(here / "run", Path(whole) / "run")


def _train(
    project: str,
    folder: Path,
    ranks: int,
    *more: str,
    order: Order | None = None,
    environment: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Ended]:
    (folder / "tmp").mkdir(exist_ok=True)

    def work(rank: int) -> None:
        for number in (1, 2):
            os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(project)
        os.environ.update({"TMPDIR": str(folder / "tmp"), "BRIM_PEER_TIMEOUT_S": str(TIMEOUT_S)})
        os.environ.update((environment or {}).get(rank, {}))
        moments = armed(order if order is not None and order.rank == rank else None, below=folder)
        sys.argv = ["brim", *TRAIN, str(folder / "run"), *more]
        try:
            code = exit_code()
        finally:
            (folder / f"moments-{rank}.json").write_text(json.dumps(moments.names))
        if code:
            raise _Left(code)

    (folder / "said-0").unlink(missing_ok=True)
    return together(ranks, work, folder=folder / "ranks", limit_s=240, ends_all=order is None or order.ends_all)


class _Left(Exception):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


def _badly_ended(order: Order, rank: int, ended: Ended, said: str) -> str:
    """What is wrong with how a rank ended, and what it said."""
    wrong, is_hit = "", rank == order.rank
    limit_s = _SOON_S if order.ends_all and order.does != "stop" else TIMEOUT_S + _GRACE_S
    asked = ended.was_told and ended.code in (-signal.SIGTERM, -signal.SIGKILL, 130)
    if "Traceback" in said or "bug in brim" in said:
        wrong = "a traceback"
    elif ended.late_s > limit_s:
        wrong = f"it ended {ended.late_s:.1f} s after the first"
    elif is_hit and order.does in ("kill", "file", "stop"):
        wrong = "" if ended.code == -signal.SIGKILL else f"exit code {ended.code}: nothing happened to it"
    elif order.does == "once":
        wrong = "" if ended.code == 0 else f"exit code {ended.code}"
    elif order.does in ("SIGINT", "SIGTERM"):
        by_signal = ended.code == -signal.SIGTERM and order.does == "SIGTERM"  # before the loop, and after it
        wrong = "" if ended.code in (0, 130) or by_signal or asked else f"exit code {ended.code}"
    elif is_hit:
        wrong = "" if ended.code == 1 and "ran out of memory" in said else f"exit code {ended.code}"
    elif ended.code == 1 and not any(each in said for each in PEER_SAID):
        wrong = "it does not say that another one failed"
    elif ended.code not in (0, 1) and not asked:
        wrong = f"exit code {ended.code}"
    return wrong and f"rank {rank}: {wrong}: …{said.strip()[-400:]}"


def _is_saved(said: str, run: Path) -> bool:
    """Whether the checkpoint is there that a rank speaks of which ran out of memory."""
    found = re.search(r"checkpoint of step (\d+) holds all", said)
    if found is None:
        return "othing had been learned yet" in said
    return (run / "checkpoints" / f"step-{int(found[1]):08d}" / "manifest.json").is_file()


def _require_well(ended: Sequence[Ended]) -> None:
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} ended with {each.code}: {each.error}"


def _require_unlocked(run: Path) -> None:
    import fcntl

    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _require_alike(run: Path, whole: Path) -> None:
    """Compare what a run has learned with the undisturbed one: each step once, on the same rows; files; weights."""
    from safetensors.torch import load_file

    ours, theirs = _log(run), _log(whole)
    if [key for key, _ in ours] != [key for key, _ in theirs]:
        more, less = (Counter(key for key, _ in each) for each in (ours, theirs))
        raise AssertionError(f"the log has more {[*(more - less)]}, less {[*(less - more)]}")
    for (key, loss), (_, expected) in zip(ours, theirs, strict=True):
        assert math.isclose(loss, expected, rel_tol=_WITHIN), f"the loss of {key} is {loss} instead of {expected}"
    files, wanted = (_files(folder) for folder in (run, whole))
    assert files == wanted, f"left: {sorted(files - wanted)}, missing: {sorted(wanted - files)}"
    one, other = (load_file(folder / "model" / "adapter_model.safetensors") for folder in (run, whole))
    assert one.keys() == other.keys(), "the model has other weights"
    far = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert far < 1e-3, f"a weight differs by {far}"


def _files(run: Path) -> set[str]:
    """The names of a run's files; of its checkpoints, the best and the newest: an interruption saves others, too."""
    *older, newest = sorted((run / "checkpoints").glob("step-*"))
    best_step = json.loads((newest / "state.json").read_text())["train"]["best_step"]
    passed = {path.name for path in older} - {f"step-{best_step:08d}"}
    return {
        path.relative_to(run).as_posix()
        for path in run.rglob("*")
        if "tensorboard" not in path.parts and not passed.intersection(path.parts)
    }


def _log(run: Path) -> list[tuple[tuple[object, ...], float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("split", "step", "num_samples", "num_tokens", "num_supervised_tokens", "effective_batch_size")
    told = [(tuple(each.get(name) for name in names), each["loss"]) for each in records if "loss" in each]
    return sorted(told, key=lambda each: str(each[0][:2]))


# What a rank does beside training: it counts, and something happens to it.


class Moments:
    """Count what a rank does; something happens at one of these moments, or from it on."""

    def __init__(self, order: Order | None, happened: Path) -> None:
        self.names: list[str] = []
        self._order, self._happened = order, happened

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function, with a moment before it and one after it."""

        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            if name != "set" or "pulse" not in arguments[1]:
                self._comes(name)
            result = function(*arguments, **options)
            if name != "set" or "pulse" not in arguments[1]:
                self._comes(f"after {name}")
            return result

        return counted

    def _comes(self, name: str) -> None:
        self.names.append(name)
        order = self._order
        if order is None or not _among(order, [name]):
            return
        number = len(_among(order, self.names))
        if number == order.at or (number > order.at and order.does == "always"):
            self._happened.touch()
            _happen(order)
        elif number == order.at + 1 and order.is_twice and order.does.startswith("SIG"):
            _happen(order)


def _happen(order: Order) -> None:
    import torch

    if order.does in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if order.does == "kill" else signal.SIGSTOP)
    elif order.does in ("once", "always"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif order.does in ("SIGINT", "SIGTERM"):
        number = signal.Signals[order.does]
        if "TORCHELASTIC_RUN_ID" in os.environ:
            os.kill(os.getppid(), number)
        else:
            os.killpg(os.getpgrp(), number)


def armed(order: Order | None, *, below: Path) -> Moments:
    """Have this process count its moments, and what is ordered happen to it. below: holds the files that count."""
    from torch._C._distributed_c10d import PrefixStore

    from brim.distributed import Ranks
    from brim.models.loss import NextToken

    if order is not None and order.does == "file":
        os.environ.update(watch(below, kill_after=order.at))
        order = None
    moments = Moments(order, below / "happened")
    for owner, name, called in (
        (NextToken, "loss", "pass"),
        (Ranks, "add", "add"),
        (Ranks, "copy_from_first", "copy"),
        (Ranks, "told", "told"),
        (Ranks, "heard", "heard"),
        (Ranks, "exchanged", "exchanged"),
        (PrefixStore, "set", "set"),
    ):
        patch.object(owner, name, moments.around(getattr(owner, name), called)).start()
    return moments


def _no_shim() -> str:
    raise Skip("needs Linux and a C compiler")
