"""What the process of a leg does: it trains, notes what the model is given, and stops or kills itself where told."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brim.api.resume_leg import Leg, read_leg
from brim.api.training import train_configuration
from brim.errors import BrimError
from brim.train.observer import Record


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
