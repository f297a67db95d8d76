"""Run one segment of a run in its own process: from a folder's newest checkpoint to a stop, or to a kill.

The process trains, reports what the model is given, and stops or kills itself in the step that its order names.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brim.errors import InputError, Problem
from brim.train import Record, RunFolder
from brim.workflows.runs import Tell, TrainOrder, run_child
from brim.workflows.training import train_configuration
from brim.workflows.verify_resume.comparison import Made


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Hold what a process reported until it ended."""

    tokens: tuple[tuple[int, str], ...]  # step and digest, for each step that was made
    killed_in: int | None  # step; None where it was stopped, or came to the end of the run
    killed_where: str  # in that step; empty where it was not killed


def run_segment(order: TrainOrder, log: Path, *, stop_after: int, kill_in: int | None = None) -> Segment:
    """Train in a new process, or in several. Raises what was raised there, or BrimError where one crashed.

    log: a file for what is printed there. stop_after: the step after which the run is stopped by a Ctrl-C to the first
    process. kill_in: the step in the middle of which that one kills itself, whereupon the others end, too.
    """
    tokens: list[tuple[int, str]] = []
    killed: dict[str, Any] = {}

    def hear(message: Mapping[str, Any]) -> None:
        if "kills" in message:
            killed.update(message["kills"])
        else:
            tokens.append((message["step"], message["sha256"]))

    told = {"order": asdict(order), "stop_after": stop_after, "kill_in": kill_in}
    ended = run_child(train, told, on_message=hear, log=log, num_processes=order.num_processes)
    if not killed:
        ended.require("a process that trains", fix=_FIX, log=log)
    return Segment(tokens=tuple(tokens), killed_in=killed.get("step"), killed_where=killed.get("where", ""))


_FIX = "free memory, if it ran out of it; --keep leaves all that it printed"


def made(folder: Path, segments: Sequence[Segment], *, after: int) -> Made:
    """Return the run that segments have made in a folder, with what the model was given after a step."""
    tokens: dict[int, set[str]] = {}
    for step, digest in (seen for segment in segments for seen in segment.tokens):
        tokens.setdefault(step, set()).add(digest)
    return Made(
        run=RunFolder(folder),
        tokens={step: frozenset(digests) for step, digests in tokens.items() if step > after},
        last_step=max(tokens),
    )


def train(told: Mapping[str, Any], tell: Tell) -> None:
    """Run a segment, in the child."""
    watcher = _Watcher(told["stop_after"], told["kill_in"], tell)
    try:
        with watcher.hooks():
            train_configuration(TrainOrder(**told["order"]), observer=watcher, say=_log)
    except KeyboardInterrupt as stopped:
        if not stopped.args:  # it came when nothing could be saved
            raise


class _Watcher:
    """Observe the run, and also what goes through the model, from the first step on."""

    def __init__(self, stop_after: int, kill_in: int | None, tell: Tell) -> None:
        self._stop_after, self._kill_in, self._tell = stop_after, kill_in, tell
        self._step: int | None = None  # the last one that was made; None before the loop begins
        self._digest = hashlib.sha256()
        self._has_stopped = False
        self._outermost: nn.Module | None = None  # of the pass in which the process is to be killed

    def hooks(self) -> ExitStack:
        """Register hooks with torch, so that no module, optimizer or loop needs to know of them."""
        stack = ExitStack()
        stack.callback(register_module_forward_pre_hook(self._before_module).remove)
        stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        return stack

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int = 0) -> None:
        self._step = first_step

    def write(self, record: Record) -> None:
        """Report which tokens a step was given."""
        if record.get("event") != "skipped" and "learning_rate" not in record:
            return  # not the line of a step
        self._step = record["step"]
        self._tell(step=self._step, sha256=self._digest.hexdigest())
        self._digest = hashlib.sha256()

    def close(self) -> None: ...

    @property
    def _is_to_be_killed(self) -> bool:
        return self._step is not None and self._kill_in is not None and self._step + 1 >= self._kill_in

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._step is None or not torch.is_grad_enabled():
            return  # a trial before the run, or an evaluation; or a process that writes no log
        if self._step + 1 == self._stop_after and not self._has_stopped:
            # Amid the last step of the segment: several processes agree with its sums to stop after it.
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGINT)
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
        self._tell(kills={"step": self._step + 1, "where": where})
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL cannot be survived")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def relocated(error: InputError, folder: Path, run: Path) -> InputError:
    """Return the error as the run itself would give it, where it names the copy that a process worked on."""
    problems = (
        Problem(**{name: text.replace(str(folder), str(run)) for name, text in asdict(problem).items()})
        for problem in error.problems
    )
    return type(error)(*problems)


def choose_disturbance(start_step: int, sizes: Sequence[int], cuts: Sequence[int]) -> tuple[int | None, int]:
    """Return the step after which the run is stopped, None where there is but one, and the one in which it is killed.

    sizes: the effective batch of each step that is made, in order; cuts: its micro-batches.

    Where the size changes, the run is stopped right before, and killed in the first step of the new size. Where steps
    have several micro-batches, it is killed in one of these, so that a part of a gradient is lost.
    """
    num_steps = len(sizes)
    changes = [number for number in range(1, num_steps) if sizes[number] != sizes[number - 1]]
    before = changes[0] if changes else num_steps // 3 or min(1, num_steps - 1)
    wanted = before if changes else before + (num_steps - before - 1) // 2
    later = [*range(wanted, num_steps), *range(before, wanted)]
    kill = next((number for number in later if cuts[number] > 1), wanted)
    return (start_step + before if before else None), start_step + kill + 1
