"""Check on copies of the user's own run whether an interruption changes anything; the run is only read.

The undisturbed and the disturbed run are made one after the other and compared. A run is checked and copied before it
is tried. Pure functions of numbers decide from which step it is tried, and where it is disturbed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from brim.config import load_config, require_trust_said_again
from brim.config.schema import Config, FinetuneTrainer
from brim.data.read import Data, Files, absolute_files, is_files, named_files, read
from brim.distributed import num_processes
from brim.errors import BrimError, CheckpointError, InputError, OutputError
from brim.notes import Say
from brim.report import listening, show
from brim.session import dataset_of
from brim.storage import verified, writing
from brim.train import RunFolder
from brim.train.checkpoints import CheckpointStore
from brim.units import format_bytes, format_count, format_seconds
from brim.workflows.runs import TrainOrder
from brim.workflows.verify_resume.comparison import (
    Made,
    Promise,
    ResumeProof,
    compared,
    compared_logs,
    is_step,
    promise_of,
    ran_out_of_memory,
    records_of,
    step_sizes,
)
from brim.workflows.verify_resume.segment import Segment, choose_disturbance, made, relocated, run_segment


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
    """Continue a run on two copies, one without a break and one stopped and killed, and compare them.

    run: its folder, finished or not; it is only read. steps: that each copy makes. from_step: after which; default: the
    newest checkpoint with so many steps after it, else the first step. dataset: a file or a saved `datasets` folder;
    default: the run's own. overrides: as for `brim train RUN --resume`. keep: leave the two in their temporary folder.

    Raises InputError where there is nothing to try, and what the run itself would raise.
    """
    started = time.perf_counter()
    folder = RunFolder(Path(run))
    require_run(folder)
    _require_counts(steps, from_step)
    config = load_config(folder.config, overrides).config
    require_trust_said_again(config, overrides, folder.config, begins=True)
    largest, number = largest_batch(config, folder), num_processes(None, config.backend.trainer.num_workers)
    with listening(say) as told, _work_folder(keep=keep, say=told) as work:
        with folder.read_only():
            start = chosen_start(folder, largest, steps=steps, from_step=from_step, say=told)
            require_room(folder, work)
            _require_data(dataset_of(config, dataset))
            _tell(folder, start, work, asked=steps, num_processes=number, say=told)
            copy_run(folder, start.checkpoint, work / "start")
        order = TrainOrder(
            config=str(folder.config),
            # Early stopping would leave steps out, and what is claimed rounds anew; steps learn the same without.
            overrides=(*overrides, "trainer.early_stop=-1", "backend.trainer.dealing=planned"),
            output_directory=str(folder.path),
            resume=True,
            dataset=None if dataset is None else absolute_files(dataset),
            num_processes=number,
        )
        trial = Trial(folder, work, start, order, told)
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
                what=f"{value!r} is not a number of steps", where=name, expected=f"a whole number, at least {least}"
            )


def _tell(run: RunFolder, start: Start, work: Path, *, asked: int, num_processes: int, say: Say) -> None:
    """Say what will be done, and about how long it takes."""
    begin = f"the checkpoint of step {start.checkpoint:,}" if start.checkpoint else "the start of the run"
    lead = f", continued to step {start.step:,} first" if start.num_leading else ""
    say(
        f"{run.path} is only read. From {begin}{lead}: {format_count(start.num_steps, 'step')} without a break, then "
        "the same with interruptions"
    )
    if start.num_steps < asked:
        say(f"{format_count(asked, 'step was', 'steps were')} asked for; only {start.num_steps:,} left there")
    records = [each for each in records_of(run) if "learning_rate" in each]
    seconds = [each["seconds"] for each in records]
    mean_s = sum(seconds[-asked:]) / len(seconds[-asked:]) if seconds else None
    if records and (number := records[-1].get("ranks", 1)) != num_processes:
        made_by, tried_on = (format_count(each, "process", "processes") for each in (number, num_processes))
        say(f"the run's last step was made by {made_by}, and it is tried with {tried_on}: --gpus {number} tries those")
    most_steps = start.num_leading + 3 * start.num_steps
    _tell_switches(run, start, say)
    time_told = "" if mean_s is None else f", about {format_seconds(mean_s * most_steps)} of training"
    starts = f"{4 + bool(start.num_leading)} " + (f"starts of {num_processes:,} " if num_processes > 1 else "")
    say(
        f"up to {format_count(most_steps, 'step')}{time_told}, in {starts}processes that each load the model; up to "
        f"{format_bytes(MOST_CHECKPOINTS * checkpoint_bytes(run))} in {work}"
    )


def _tell_switches(run: RunFolder, start: Start, say: Say) -> None:
    """Say where the batch size has changed so far, if not in the steps that are tried."""
    switches = [event["step"] for event in records_of(run) if event.get("event") == "schedule"]
    if switches and not any(start.step < step <= start.step + start.num_steps for step in switches):
        before = max(1, switches[-1] - 2)
        say(f"the batch size changed elsewhere, last at step {switches[-1]:,}: --from-step {before:,} tries that")


@contextmanager
def _work_folder(*, keep: bool, say: Say) -> Iterator[Path]:
    """Yield a folder that is removed afterwards, also after Ctrl-C, unless it is to be kept."""
    work = Path(tempfile.mkdtemp(prefix="brim-verify-resume-"))
    try:
        yield work
    finally:
        if keep:
            say(f"both runs, and what their processes printed, are kept in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


class Trial:
    """Make the two runs, one after the other."""

    def __init__(self, folder: RunFolder, work: Path, start: Start, order: TrainOrder, say: Say) -> None:
        """Take the order of the run itself; each process gets it with the folder of a copy."""
        self._folder, self._work, self._start, self._order, self._say = folder, work, start, order, say
        self._num_segments = 0

    def proof(self) -> ResumeProof:
        """Make both runs, and compare them."""
        start = self._start
        if start.num_leading:
            self._say(f"making step {start.step:,} of the run again")
            self._go("start", stop_after=start.step)
        with writing("a copy of the run", self._work):
            shutil.copytree(self._work / "start", self._work / "undisturbed")
            (self._work / "start").rename(self._work / "disturbed")
        undisturbed = self._undisturbed()
        self._require_same_rows(undisturbed)
        records = records_of(undisturbed.run, after=start.step, upto=undisturbed.last_step)
        steps = [record for record in records if is_step(record)]
        sizes = step_sizes(steps)
        stop_after, kill_in = choose_disturbance(
            start.step, sizes, [each.get("num_micro_batches", 0) for each in steps]
        )
        disturbed, killed = self._disturbed(stop_after, kill_in, last_step=undisturbed.last_step)
        others = records_of(disturbed.run, after=start.step, upto=undisturbed.last_step)
        settings = read_state(undisturbed.run, undisturbed.last_step)["settings"]
        device = json.loads(undisturbed.run.environment.read_text(encoding="utf-8"))["device"]
        promise = promise_of(settings, device=device, ran_out_of_memory=ran_out_of_memory([*records, *others]))
        assert killed.killed_in is not None, "as _disturbed has seen to"
        return ResumeProof(
            run=self._folder.path,
            device=device,
            num_processes=self._order.num_processes,
            precision=settings["precision"],
            checkpoint_step=start.checkpoint,
            start_step=start.step,
            num_steps=undisturbed.last_step - start.step,
            effective_batch_sizes=tuple(sizes),
            stopped_after=stop_after,
            killed_in=killed.killed_in,
            killed_where=killed.killed_where,
            promise=promise,
            checks=tuple(compared(undisturbed, disturbed, promise, after=start.step)),
            own_log=self._own_log(records, promise, upto=undisturbed.last_step),
            seconds=0.0,
            folder=None,
        )

    def _undisturbed(self) -> Made:
        start = self._start
        last_step = start.step + start.num_steps
        steps = f"step {last_step:,}" if start.num_steps == 1 else f"steps {start.step + 1:,} to {last_step:,}"
        self._say(f"{steps} without a break")
        ended = self._go("undisturbed", stop_after=last_step)
        return made(self._work / "undisturbed", [ended], after=start.step)

    def _disturbed(self, stop_after: int | None, kill_in: int, *, last_step: int) -> tuple[Made, Segment]:
        segments, again = [], "the same"
        if stop_after is not None:
            self._say(f"the same, stopped (Ctrl-C) after step {stop_after:,}")
            segments.append(self._go("disturbed", stop_after=stop_after))
            again = "continued, and"
        self._say(f"{again} killed (SIGKILL) in step {kill_in:,}")
        killed = self._go("disturbed", stop_after=last_step, kill_in=kill_in)
        if killed.killed_in is None:
            raise BrimError(
                what=f"the run could not be killed in step {kill_in:,} or later: none was an update",
                where=str(self._folder.path),
                fix="try other steps with --from-step",
            )
        self._say(f"continued, to step {last_step:,}")
        segments += [killed, self._go("disturbed", stop_after=last_step)]
        return made(self._work / "disturbed", segments, after=self._start.step), killed

    def _go(self, name: str, *, stop_after: int, kill_in: int | None = None) -> Segment:
        """Run one process, in one of the copies. Errors of the user's name the run, not the copy."""
        self._num_segments += 1
        run = self._work / name
        order = replace(self._order, output_directory=str(run))
        log = self._work / f"process-{self._num_segments}.txt"
        try:
            return run_segment(order, log, stop_after=stop_after, kill_in=kill_in)
        except InputError as error:
            raise relocated(error, run, self._folder.path) from error

    def _require_same_rows(self, undisturbed: Made) -> None:
        """Raise OutputError for other rows than the checkpoints': a copy that starts from the beginning takes any."""
        whole = whole_checkpoints(self._folder, CheckpointStore(self._folder.checkpoints).steps())
        known = {read_state(self._folder, step)["train"]["rows_digest"] for step in whole}
        if known and read_state(undisturbed.run, undisturbed.last_step)["train"]["rows_digest"] not in known:
            raise OutputError(
                what="the training or validation rows are not those that this run was started with",
                where=str(self._folder.path),
                expected="the same data, template, limits and tokenizer",
                fix="name the file that it was trained on with --dataset",
            )

    def _own_log(self, records: Sequence[Mapping[str, Any]], promise: Promise, *, upto: int) -> str:
        """Say how the run's own log of these steps compares with that of the undisturbed copy."""
        own = [each for each in records_of(self._folder, after=self._start.step, upto=upto) if is_step(each)]
        steps = {each["step"] for each in own}
        again = [each for each in records if is_step(each) and each["step"] in steps]
        if not own:
            return "has not reached these steps"
        if any("rows_by_rank" in each for each in own):
            return "is of claimed micro-batches (backend.trainer.dealing), which do not give the same bits twice"
        wrong = [check for check in compared_logs(own, again, promise) if check.difference is not None]
        if not wrong:
            return f"has the same figures for {len(own):,} of these steps"
        found = wrong[0].difference
        assert found is not None, "as it was chosen"
        return (
            f"differs in {', '.join(check.name for check in wrong)}, first at {found.where}: {found.undisturbed}, now "
            f"{found.disturbed}. Another machine, version, number of GPUs or threads, partition or setting explains "
            "that; without one, the copy did not continue as the run did"
        )


# The finished run keeps three checkpoints at most; the other has four while it writes one.
MOST_CHECKPOINTS = 7


def require_run(run: RunFolder) -> None:
    """Raise InputError where there is no run folder."""
    if run.path.is_dir() and run.is_run and run.config.is_file():
        return
    raise InputError(
        what="this folder is not a run" if run.path.is_dir() else "this is not the folder of a run",
        where=str(run.path),
        expected="the folder that `brim train` wrote, with config.yaml, plan.json and checkpoints/",
        fix="name the run's folder",
    )


def largest_batch(config: Config, run: RunFolder) -> int:
    """Return the most rows that a step can have. Raises InputError where nothing is trained."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        raise InputError(
            what="trainer.type is none: nothing is trained, so nothing can be interrupted",
            where=str(run.config),
            expected="a run that trains",
        )
    assert isinstance(trainer.effective_batch_size, int), "the configuration of a run is resolved"
    adaptation = trainer.batch_adaptation
    return trainer.effective_batch_size if adaptation is None else adaptation.max


def chosen_start(run: RunFolder, largest_size: int, *, steps: int, from_step: int | None, say: Say) -> Start:
    """Choose where to begin. Raises CheckpointError where the run has checkpoints and none is whole."""
    there = CheckpointStore(run.checkpoints).steps()
    whole = whole_checkpoints(run, there)
    damaged = [step for step in there if step not in whole]
    if damaged and not whole:
        raise CheckpointError(
            what=f"no whole checkpoint is left: {_listed(damaged)} damaged",
            where=str(run.checkpoints),
            fix="restore the folder from a copy; such a run cannot be resumed",
        )
    for step in damaged:
        say(f"the checkpoint of step {step:,} is damaged, and is passed over")
    reach = _reach(run, largest_size)
    consumed = {step: read_state(run, step)["train"]["consumed_samples"] for step in whole}
    return choose_start(consumed, reach, steps=steps, from_step=from_step)


def whole_checkpoints(run: RunFolder, steps: Sequence[int]) -> list[int]:
    """Return the steps whose checkpoint is what its manifest says."""
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
    """Copy what a run needs to continue from one of its checkpoints; nothing where it starts from the beginning."""
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
            what=f"the temporary folder has {format_bytes(free_bytes)} left, and up to "
            f"{format_bytes(needed_bytes)} are needed for two copies of the run",
            where=str(work.parent),
            fix="name a folder with more free space in the environment: TMPDIR=FOLDER brim verify-resume …",
        )


def checkpoint_bytes(run: RunFolder) -> int:
    """Return the bytes of the largest checkpoint."""
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
            logged_steps=max((record["step"] for record in records_of(run)), default=0),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            what=f"the run's length cannot be read from its plan ({type(error).__name__}: {error})",
            where=str(run.plan),
            fix=f"`brim train {run.path} --resume` writes it again",
        ) from error


def _listed(steps: Sequence[int]) -> str:
    names = ", ".join(f"{step:,}" for step in steps)
    return f"that of step {names} is" if len(steps) == 1 else f"those of steps {names} are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Say how far a run goes."""

    total_steps: int | None  # None: the batch sizes are measured while it runs
    total_samples: int
    largest_size: int  # rows of a step, at most
    logged_steps: int  # that it has made so far

    def steps_left(self, step: int, consumed_samples: int) -> int:
        """Return the steps after this one; a lower bound where they cannot be known."""
        if self.total_steps is not None:
            return max(0, self.total_steps - step)
        left = max(0, -(-(self.total_samples - consumed_samples) // self.largest_size))
        return max(left, self.logged_steps - step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Say where both runs begin."""

    checkpoint: int  # the step whose checkpoint of the run is used; 0: none, the run starts from the beginning
    step: int  # after which they go on; made once from the checkpoint, where it is another
    num_steps: int  # that each of them makes

    @property
    def num_leading(self) -> int:
        """Return the number of steps that are made once, before the run is copied."""
        return self.step - self.checkpoint


def choose_start(consumed: Mapping[int, int], reach: Reach, *, steps: int, from_step: int | None) -> Start:
    """Choose the step after which both runs begin, and the checkpoint that leads there.

    consumed: rows that were consumed at each whole checkpoint, by its step. from_step: as asked for;
    None: the newest checkpoint with enough steps after it, else the run's first step.
    Raises InputError where no step is left to be made twice.
    """
    consumed = {0: 0, **consumed}
    enough = [step for step, rows in consumed.items() if step and reach.steps_left(step, rows) >= steps]
    # Nothing is saved before the first step: a run that is killed in it starts, and is planned, from the beginning.
    step = max(1, from_step if from_step is not None else max(enough, default=1))
    checkpoint = max(each for each in consumed if each <= step)
    left = reach.steps_left(checkpoint, consumed[checkpoint]) - (step - checkpoint)
    if left < 1:
        known = "" if reach.total_steps is None else f": the run has {reach.total_steps:,}"
        raise InputError(
            what=f"no step is left after step {step:,}{known}",
            where="--from-step" if from_step is not None else "",
            expected="a step that is not the run's last" if from_step else "a run of at least two steps",
            fix="name an earlier step with --from-step" if from_step else "try it on a longer run",
        )
    return Start(checkpoint=checkpoint, step=step, num_steps=min(steps, left))
