"""Run one segment of a run in its own process: from a folder's newest checkpoint to a stop, or to a kill.

The process trains, notes what the model is given, and stops or kills itself in the step that it was given.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import brim.errors
from brim.errors import BrimError, InputError, Problem
from brim.train import Record
from brim.workflows.training import train_configuration


def main(order: str) -> None:
    """Run the leg of this file. How it ended stands in its outcome; what is no BrimError is a traceback."""
    leg = read_leg(Path(order))
    watcher = _Watcher(leg)
    try:
        with watcher.hooks():
            train_configuration(
                leg.config,
                leg.overrides,
                dataset=leg.dataset,
                output_directory=Path(leg.run),
                resume=True,
                observer=watcher,
                say=_log,
            )
    except KeyboardInterrupt as stopped:
        if not stopped.args:  # it came where nothing could be saved
            raise
        _tell(leg, how="stopped")
    except BrimError as error:
        _tell(leg, error=type(error).__name__, problems=[asdict(problem) for problem in error.problems])
    else:
        _tell(leg, how="finished")


class _Watcher:
    """An observer of the run that also sees what goes through the model, from the first step on."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._step: int | None = None  # the last one that was made; None before the loop begins
        self._digest = hashlib.sha256()
        self._outermost: nn.Module | None = None  # of the pass in which the process is to be killed

    def hooks(self) -> ExitStack:
        """What torch calls meanwhile. No module, optimizer or loop knows of it."""
        stack = ExitStack()
        for hook in (register_module_forward_pre_hook(self._before_module),):
            stack.callback(hook.remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        return stack

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int = 0) -> None:
        self._step = first_step

    def write(self, record: Record) -> None:
        """Note which tokens a step was given, and stop after the last one of this leg."""
        if record.get("event") != "skipped" and "learning_rate" not in record:
            return  # not the line of a step
        self._step = record["step"]
        with Path(self._leg.tokens).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self._step, "sha256": self._digest.hexdigest()}) + "\n")
        self._digest = hashlib.sha256()
        if self._step == self._leg.stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None: ...

    @property
    def _is_to_be_killed(self) -> bool:
        return self._step is not None and self._leg.kill_in is not None and self._step + 1 >= self._leg.kill_in

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._step is None or not torch.is_grad_enabled():
            return  # a trial before the run, or an evaluation
        if self._is_to_be_killed:
            if module is self._outermost:
                self._kill("between its micro-batches")
            self._outermost = self._outermost or module
        if isinstance(module, nn.Embedding) and inputs and not inputs[0].is_floating_point():
            self._digest.update(repr(tuple(inputs[0].shape)).encode())
            self._digest.update(inputs[0].detach().cpu().contiguous().numpy().tobytes())

    def _before_update(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._is_to_be_killed:
            self._kill("before its update")

    def _kill(self, where: str) -> NoReturn:
        assert self._step is not None, "asked before"
        _tell(self._leg, how="killed", step=self._step + 1, where=where)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL cannot be survived")


def _tell(leg: Leg, **outcome: object) -> None:
    leg.outcome.write_text(json.dumps(outcome), encoding="utf-8")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


_KILLED = -9


# As the process that asks finds modules, so does the one that is started; -m would look in the current folder first.
COMMAND: Sequence[str] = (
    sys.executable,
    "-c",
    "import os, signal, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep)\n"
    "from brim.workflows.compare.child import signal_when_alone; signal_when_alone(signal.SIGKILL)\n"
    "from brim.workflows.verify_resume.leg import main; main(sys.argv[1])",
    os.pathsep.join(sys.path),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What is to be done. Texts and numbers alone, so that it goes to another process as JSON."""

    config: str  # a file
    overrides: tuple[str, ...]
    dataset: str | Sequence[str] | None
    run: str  # the folder that is continued
    told: str  # the folder for what the process saw
    stop_after: int  # the step after which it sends itself Ctrl-C
    kill_in: int | None = None  # the step in the middle of which it kills itself

    @property
    def order(self) -> Path:
        return Path(self.told) / "leg.json"

    @property
    def log(self) -> Path:
        return Path(self.told) / "log.txt"

    @property
    def tokens(self) -> Path:
        """A line a step: the digest of the tokens that the model was given."""
        return Path(self.told) / "tokens.jsonl"

    @property
    def outcome(self) -> Path:
        return Path(self.told) / "outcome.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a leg ended, and what its process saw."""

    how: Literal["stopped", "finished", "killed"]
    killed_in: int | None  # step
    killed_where: str  # in that step; empty where it was not killed
    tokens: tuple[tuple[int, str], ...]  # step and digest, for each step that was made


def go(leg: Leg) -> Ended:
    """Run the leg to its end. Raises what its process raised, or BrimError where it broke down."""
    Path(leg.told).mkdir(parents=True)
    leg.order.write_text(json.dumps({name: getattr(leg, name) for name in Leg.__slots__}), encoding="utf-8")
    code = start(leg)
    outcome = _read(leg.outcome)
    if code == 0 and outcome.get("how") in ("stopped", "finished"):
        return Ended(how=outcome["how"], killed_in=None, killed_where="", tokens=_tokens(leg))
    if code == _KILLED and outcome.get("how") == "killed":
        return Ended(how="killed", killed_in=outcome["step"], killed_where=outcome["where"], tokens=_tokens(leg))
    if "error" in outcome:
        raise _error(outcome)
    raise BrimError(
        Problem(
            what=f"a process that trains ended by itself ({_ending(code)}): {_last_line(leg.log)}",
            where=leg.log.name,
            expected="that the run goes on, as with `brim train RUN --resume`",
            fix="free memory, if that is what it lacked; --keep leaves all that it said",
        )
    )


def start(leg: Leg) -> int:
    """Start the process and wait for its end; minus the signal where one ended it. It does not outlive this one."""
    with leg.log.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, str(leg.order)], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        with process:
            try:
                return process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def read_leg(order: Path) -> Leg:
    """The leg that a process is to run."""
    content = json.loads(order.read_text(encoding="utf-8"))
    return Leg(**{**content, "overrides": tuple(content["overrides"])})


def _error(outcome: dict[str, Any]) -> BrimError:
    """The error that the process ended with, of its own class, so that the exit code is the same."""
    kind = getattr(brim.errors, outcome["error"])
    assert issubclass(kind, BrimError), "as the process wrote it"
    error: BrimError = kind(*(Problem(**problem) for problem in outcome["problems"]))
    return error


def relocated(error: InputError, folder: Path, run: Path) -> InputError:
    """The error as the run itself would give it, where it names the copy that a process worked on."""
    problems = (
        Problem(
            what=problem.what.replace(str(folder), str(run)),
            where=problem.where.replace(str(folder), str(run)),
            expected=problem.expected,
            fix=problem.fix.replace(str(folder), str(run)),
        )
        for problem in error.problems
    )
    return type(error)(*problems)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _tokens(leg: Leg) -> tuple[tuple[int, str], ...]:
    lines = leg.tokens.read_text(encoding="utf-8").splitlines() if leg.tokens.exists() else []
    return tuple((line["step"], line["sha256"]) for line in map(json.loads, lines))


def _read(outcome: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8")) if outcome.exists() else {}
    return content
