"""The run that a resumption is tried on: what it must be, what its checkpoints are, and a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.api.resume_comparison import EVERY_STEP, records_of
from brim.api.resume_plan import Reach, Start, choose_start
from brim.api.session import Say
from brim.config import Config, FinetuneTrainer
from brim.digests import verified
from brim.errors import CheckpointError, InputError, OutputError, Problem
from brim.files import writing
from brim.train.checkpoint import CheckpointStore
from brim.train.run_folder import RunFolder
from brim.units import format_bytes

# Of the two that are made, the finished one keeps three checkpoints at most; the other has four while it writes one.
MOST_CHECKPOINTS = 7


def require_run(run: RunFolder) -> None:
    """Raise InputError where there is no run folder."""
    if run.path.is_dir() and run.is_run and run.config.is_file():
        return
    raise InputError(
        Problem(
            what="this folder is not a run" if run.path.is_dir() else "this is not the folder of a run",
            where=str(run.path),
            expected="the folder that `brim train` wrote, with config.yaml, plan.json and checkpoints/",
            fix="name the run's folder",
        )
    )


def largest_batch(config: Config, run: RunFolder) -> int:
    """The most rows of a step, where they follow the noise. Raises InputError where nothing is trained."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        raise InputError(
            Problem(
                what="trainer.type is none: nothing is trained, so nothing can be interrupted",
                where=str(run.config),
                expected="a run that trains",
            )
        )
    assert isinstance(trainer.effective_batch_size, int), "the configuration of a run is resolved"
    adaptation = trainer.batch_adaptation
    return trainer.effective_batch_size if adaptation is None else adaptation.max


def chosen_start(run: RunFolder, largest_size: int, *, steps: int, from_step: int | None, say: Say) -> Start:
    """Where to begin. Raises CheckpointError where the run has checkpoints and none is whole."""
    there = CheckpointStore(run.checkpoints).steps()
    whole = whole_checkpoints(run, there)
    damaged = [step for step in there if step not in whole]
    if damaged and not whole:
        raise CheckpointError(
            Problem(
                what=f"no whole checkpoint is left: {_listed(damaged)} damaged",
                where=str(run.checkpoints),
                fix="restore the folder from a copy; such a run cannot be resumed",
            )
        )
    for step in damaged:
        say(f"the checkpoint of step {step:,} is damaged, and is passed over")
    reach = _reach(run, largest_size)
    consumed = {step: read_state(run, step)["train"]["consumed_samples"] for step in whole}
    return choose_start(consumed, reach, steps=steps, from_step=from_step)


def whole_checkpoints(run: RunFolder, steps: Sequence[int]) -> list[int]:
    """The steps whose checkpoint is what its manifest says."""
    whole = []
    for step in steps:
        try:
            verified(run.checkpoints / f"step-{step:08d}")
        except (OSError, ValueError):
            continue
        whole.append(step)
    return whole


def read_state(run: RunFolder, step: int) -> dict[str, Any]:
    file = run.checkpoints / f"step-{step:08d}" / "state.json"
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return state


def copy_run(run: RunFolder, checkpoint: int, to: Path) -> None:
    """What a run needs to go on from one of its checkpoints; nothing where it starts anew."""
    with writing("a copy of the run", to):
        to.mkdir()
        if not checkpoint:
            return
        for file in (run.config, run.plan, run.metrics):
            if file.is_file():
                shutil.copyfile(file, to / file.name)
        name = f"step-{checkpoint:08d}"
        shutil.copytree(run.checkpoints / name, RunFolder(to).checkpoints / name, copy_function=shutil.copyfile)


def require_room(run: RunFolder, work: Path) -> None:
    """Raise OutputError where the checkpoints of two copies of the run may not fit into `work`."""
    needed_bytes = MOST_CHECKPOINTS * checkpoint_bytes(run)
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        raise OutputError(
            Problem(
                what=f"the temporary folder has {format_bytes(free_bytes)} left, and up to "
                f"{format_bytes(needed_bytes)} are needed for two copies of the run",
                where=str(work.parent),
                fix="name a folder with more room in the environment: TMPDIR=FOLDER brim verify-resume …",
            )
        )


def checkpoint_bytes(run: RunFolder) -> int:
    """Of the largest one."""
    folders = run.checkpoints.glob("step-*")
    return max((sum(file.stat().st_size for file in folder.iterdir()) for folder in folders), default=0)


def _reach(run: RunFolder, largest_size: int) -> Reach:
    try:
        plan = json.loads(run.plan.read_text(encoding="utf-8"))
        total_steps = plan["total_steps"]
        return Reach(
            total_steps=None if total_steps is None else int(total_steps),
            total_samples=int(plan["total_samples"]),
            largest_size=largest_size,
            logged_steps=max((record["step"] for record in records_of(run, after=0, upto=EVERY_STEP)), default=0),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            Problem(
                what=f"what the run's plan says of its length cannot be read ({type(error).__name__}: {error})",
                where=str(run.plan),
                fix=f"`brim train {run.path} --resume` writes it anew",
            )
        ) from error


def _listed(steps: Sequence[int]) -> str:
    names = ", ".join(f"{step:,}" for step in steps)
    return f"that of step {names} is" if len(steps) == 1 else f"those of steps {names} are"
