"""Whether an interruption changes anything, tried on copies of the user's own run: the run itself is only read."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from brim.api.resume_comparison import EVERY_STEP, records_of
from brim.api.resume_plan import Start
from brim.api.resume_proof import ResumeProof
from brim.api.resume_source import (
    MOST_CHECKPOINTS,
    checkpoint_bytes,
    chosen_start,
    copy_run,
    largest_batch,
    require_room,
    require_run,
)
from brim.api.resume_trial import Trial
from brim.api.session import Say, dataset_of
from brim.config import load_config, require_trust_said_again
from brim.data import Data, read
from brim.data.read_files import Files, absolute_files, is_files, named_files
from brim.errors import InputError, Problem
from brim.report.screen import listening, show
from brim.train.run_folder import RunFolder, read_only
from brim.units import format_bytes, format_count, format_seconds


def verify_resume(
    run: str | Path,
    *,
    steps: int = 4,
    from_step: int | None = None,
    dataset: Files | None = None,
    overrides: Sequence[str] = (),
    keep: bool = False,
    say: Say | None = show,
) -> ResumeProof:
    """Go on with copies of a run twice, once without a break and once stopped and killed, and compare.

    run: its folder, finished or not; it is only read. steps: that each copy makes. from_step: after which; default: the
    newest checkpoint that leaves so many, else the first step. dataset: a file or a saved `datasets` folder; default:
    the run's own. overrides: as for `brim train RUN --resume`. keep: leave the two in their temporary folder.

    Raises InputError where there is nothing to try, and what the run itself would raise.
    """
    started = time.perf_counter()
    folder = RunFolder(Path(run))
    require_run(folder)
    _require_counts(steps, from_step)
    config = load_config(folder.config, overrides).config
    require_trust_said_again(config, overrides, folder.config, begins=True)
    largest = largest_batch(config, folder)
    with listening(say) as told, _work_folder(keep=keep, say=told) as work:
        with read_only(folder):
            start = chosen_start(folder, largest, steps=steps, from_step=from_step, say=told)
            require_room(folder, work)
            _require_data(dataset_of(config, dataset))
            _tell(folder, start, work, asked=steps, say=told)
            copy_run(folder, start.checkpoint, work / "start")
        # A run that stops early would leave steps out; what a step learns does not depend on it.
        trial = Trial(
            folder,
            work,
            start,
            overrides=(*overrides, "trainer.early_stop=-1"),
            dataset=None if dataset is None else absolute_files(dataset),
            say=told,
        )
        return replace(trial.proof(), seconds=round(time.perf_counter() - started, 3), folder=work if keep else None)


def _require_data(dataset: Data) -> None:
    """Raise DataError for files that are not there, before anything is tried."""
    if is_files(dataset):
        files = named_files(cast(Files, dataset))
        if not all(Path(file).expanduser().exists() for file in files):
            read(files)


def _require_counts(steps: int, from_step: int | None) -> None:
    for name, value, least in (("--steps", steps, 1), ("--from-step", from_step or 0, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                Problem(
                    what=f"{value!r} is no number of steps", where=name, expected=f"a whole number, at least {least}"
                )
            )


def _tell(run: RunFolder, start: Start, work: Path, *, asked: int, say: Say) -> None:
    """What will be done, and about how long it takes."""
    begin = f"the checkpoint of step {start.checkpoint:,}" if start.checkpoint else "the start of the run"
    lead = f", which goes on to step {start.step:,} first" if start.num_leading else ""
    say(
        f"{run.path} is only read. From {begin}{lead}: {format_count(start.num_steps, 'step')} without a break, then "
        "the same with interruptions"
    )
    if start.num_steps < asked:
        say(f"{asked:,} steps were asked for; no more than {start.num_steps:,} left there")
    seconds = [each["seconds"] for each in records_of(run, after=0, upto=EVERY_STEP) if "learning_rate" in each]
    mean_s = sum(seconds[-asked:]) / len(seconds[-asked:]) if seconds else None
    most_steps = start.num_leading + 3 * start.num_steps
    _tell_switches(run, start, say)
    time_told = "" if mean_s is None else f", about {format_seconds(mean_s * most_steps)} of training"
    say(
        f"up to {format_count(most_steps, 'step')}{time_told}, in {4 + bool(start.num_leading)} processes that each "
        f"load the model; up to {format_bytes(MOST_CHECKPOINTS * checkpoint_bytes(run))} in {work}"
    )


def _tell_switches(run: RunFolder, start: Start, say: Say) -> None:
    """Where the batch size has changed so far, if not in the steps that are tried."""
    events = records_of(run, after=0, upto=EVERY_STEP)
    switches = [event["step"] for event in events if event.get("event") == "schedule"]
    if switches and not any(start.step < step <= start.step + start.num_steps for step in switches):
        before = max(1, switches[-1] - 2)
        say(f"the batch size changed elsewhere, last at step {switches[-1]:,}: --from-step {before:,} tries that")


@contextmanager
def _work_folder(*, keep: bool, say: Say) -> Iterator[Path]:
    """A folder that is gone afterwards, also after Ctrl-C, but where it is to be kept."""
    work = Path(tempfile.mkdtemp(prefix="brim-verify-resume-"))
    try:
        yield work
    finally:
        if keep:
            say(f"both runs, and what their processes said, are kept in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
