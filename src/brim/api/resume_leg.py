"""One leg of a run, in a process of its own: from the newest checkpoint of a folder to a stop, or to a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import brim.errors
from brim.errors import BrimError, InputError, Problem

_KILLED = -9

# As the process that asks finds modules, so does the one that is started; -m would look in the current folder first.
COMMAND: Sequence[str] = (
    sys.executable,
    "-c",
    "import os, signal, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep)\n"
    "from brim.api.parent_watch import signal_when_alone; signal_when_alone(signal.SIGKILL)\n"
    "from brim.api.resume_process import main; main(sys.argv[1])",
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
