"""SIGKILL: at random moments, after every operation on a file, in the middle of every write.

The process cannot do anything about it. What counts is that the run which is then continued with --resume is, to the
bit, the one that nobody disturbed: weights, optimizer and random states, the log, and no file left over.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults import Settings, Trial
from faults.cases import Case, Skip, spread, trials
from faults.forked import Done
from faults.order import renames
from faults.shim import Operation, read_log, watch
from faults.subject import Subject, difference, fingerprint, make_subject, saved_step, told_wrong

RANDOM, AFTER, AMID = "kill-random", "kill-after", "kill-amid"
AGAIN, ANEW, PREDICT, ORDER = "kill-again", "kill-anew", "kill-predict", "order"
NUM_RANDOM, NUM_AGAIN = 200, 50
_SHORT = {RANDOM: 1, AFTER: 4, AMID: 1, AGAIN: 1, ANEW: 1, PREDICT: 1}
_PREDICTIONS = "predictions.jsonl"
_KILLED = -9
_NO_SHIM = "needs Linux and a C compiler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The run that nothing happens to, and the same run once more from its end."""

    run: Path
    marks: dict[str, str]
    seconds: float  # the fastest
    operations: list[Operation]  # of the run; none without the library that counts them
    operations_anew: list[Operation]  # of `train --resume` after its end
    operations_predicting: list[Operation]
    predictions: bytes
    files_predicted: frozenset[str]  # all that stands there then


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    (settings.folder / "project").mkdir()
    subject = make_subject(settings.folder / "project", settings.brim)
    killer = _Killer(subject, settings, _undisturbed(subject, settings.folder))
    yield from trials(killer.cases(), settings)


class _Killer:
    def __init__(self, subject: Subject, settings: Settings, whole: Undisturbed) -> None:
        self._subject, self._settings, self._whole = subject, settings, whole
        self._chance = random.Random(settings.seed)
        self._number = 0

    def cases(self) -> Iterator[Case]:
        """In an order that does not depend on which of them are done."""
        operations, anew = self._whole.operations, self._whole.operations_anew
        yield from self._random(NUM_RANDOM)
        if not operations:
            for row in (AFTER, AMID, AGAIN, ANEW, PREDICT, ORDER):
                yield Case(row=row, name="all", judge=_no_shim)
            return
        for each in self._some(AFTER, operations):
            yield Case(row=AFTER, name=_named("after", each), judge=partial(self._once, kill_after=each.number))
        for each in self._some(AMID, [o for o in operations if o.is_tearable]):
            yield Case(row=AMID, name=_named("amid", each), judge=partial(self._once, kill_amid=each.number))
        yield from self._again(NUM_AGAIN)
        for each in self._some(ANEW, [o for o in anew if o.takes_away] if self._settings.short else anew):
            yield Case(row=ANEW, name=_named("after", each), judge=partial(self._anew, each.number))
        predicting = self._whole.operations_predicting
        if self._settings.short:
            predicting = [o for o in predicting if o.is_tearable]
        for each in self._some(PREDICT, predicting):
            yield Case(row=PREDICT, name=_named("after", each), judge=partial(self._predict, kill_after=each.number))
            if each.is_tearable:
                yield Case(row=PREDICT, name=_named("amid", each), judge=partial(self._predict, kill_amid=each.number))
        for name, wrong in renames(operations):
            yield Case(row=ORDER, name=name, judge=partial(str, wrong))

    def _some(self, row: str, operations: list[Operation]) -> list[Operation]:
        if not self._settings.short:
            return operations
        return [operations[n] for n in spread(len(operations), _SHORT[row], seed=self._settings.seed)]

    def _random(self, wanted: int) -> Iterator[Case]:
        for _ in range(_SHORT[RANDOM] if self._settings.short else wanted):
            part = self._chance.random()
            yield Case(row=RANDOM, name=f"at {part:.4f} of the run", judge=partial(self._at, part))

    def _again(self, wanted: int) -> Iterator[Case]:
        for _ in range(_SHORT[AGAIN] if self._settings.short else wanted):
            first, second = (self._chance.choice(self._whole.operations) for _ in range(2))
            name = f"{_named('after', first)}, then after operation {second.number} of what is continued"
            yield Case(row=AGAIN, name=name, judge=partial(self._twice, first.number, second.number))

    def _at(self, part: float) -> str:
        """A run that ended before its moment had come is done again, with less time."""
        seconds = part * self._whole.seconds
        while True:
            run = self._new_run()
            killed = self._subject.train(run, limit_s=seconds)
            if killed.timed_out and killed.code == _KILLED:
                return self._continued(run)
            seconds *= 0.9

    def _once(self, *, kill_after: int = 0, kill_amid: int = 0) -> str:
        run, killed = self._killed(self._subject.train, kill_after=kill_after, kill_amid=kill_amid)
        return _not_killed(killed) or self._continued(run)

    def _twice(self, first: int, second: int) -> str:
        run, killed = self._killed(self._subject.train, kill_after=first)
        again = self._subject.train(run, resume=True, environment=watch(run, kill_after=second))
        if again.code not in (0, _KILLED):
            return told_wrong(again, code=0)
        return _not_killed(killed) or self._continued(run)

    def _anew(self, number: int) -> str:
        """A finished run that is being written anew can be used at any moment, and be finished again."""
        run = self._new_run()
        shutil.copytree(self._whole.run, run)
        killed = self._subject.train(run, resume=True, environment=watch(run, kill_after=number))
        output = run.with_suffix(".jsonl")
        predicted = self._subject.predict(run, output)
        wrong = _not_killed(killed) or told_wrong(predicted, code=0)
        if not wrong and output.read_bytes() != self._whole.predictions:
            wrong = "it predicts otherwise"
        return wrong or self._continued(run)

    def _predict(self, *, kill_after: int = 0, kill_amid: int = 0) -> str:
        def predict(folder: Path, *, environment: dict[str, str]) -> Done:
            folder.mkdir()
            return self._subject.predict(self._whole.run, folder / _PREDICTIONS, environment=environment)

        folder, killed = self._killed(predict, kill_after=kill_after, kill_amid=kill_amid)
        output = folder / _PREDICTIONS
        wrong = _not_killed(killed)
        if not wrong and output.exists() and output.read_bytes() != self._whole.predictions:
            wrong = "it predicted otherwise, or in part"
        wrong = wrong or told_wrong(self._subject.predict(self._whole.run, output, resume=True), code=0)
        if not wrong and output.read_bytes() != self._whole.predictions:
            wrong = "continued, it predicts otherwise"
        left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - self._whole.files_predicted
        return wrong or (f"left: {sorted(left)}" if left else "")

    def _killed(self, start: Callable[..., Done], *, kill_after: int = 0, kill_amid: int = 0) -> tuple[Path, Done]:
        """Return the folder of a process that was killed at an operation, and its end.

        How often logs and predictions are written, and what is written beside a checkpoint, is a matter of time: where
        an operation did not come, or could not be torn, the one before it counts.
        """
        while True:
            folder = self._new_run()
            killed = start(folder, environment=watch(folder, kill_after=kill_after, kill_amid=kill_amid))
            if killed.code != 0 or max(kill_after, kill_amid) <= 1:
                return folder, killed
            kill_after, kill_amid = max(kill_after, kill_amid) - 1, 0

    def _continued(self, run: Path) -> str:
        saved = saved_step(run)
        done = self._subject.train(run, resume=True)
        wrong = told_wrong(done, code=0)
        said = (f"continuing after step {saved} ", f"ended after step {saved} ") if saved else ("nothing to continue",)
        if not wrong and not any(each in done.err for each in said):  # a run that starts anew ends the same
            wrong = f"it says none of {said}: {done.err.strip()[:300]}"
        if not wrong and "damaged" in done.err:
            wrong = f"the kill left something damaged behind: {done.err.strip()[:300]}"
        wrong = wrong or difference(run, self._whole.marks)
        if not wrong:
            shutil.rmtree(run)
        return wrong

    def _new_run(self) -> Path:
        self._number += 1
        return self._settings.folder / f"run-{self._number}"


def _undisturbed(subject: Subject, folder: Path) -> Undisturbed:
    run, log, anew_log = folder / "whole", folder / "operations.log", folder / "anew.log"
    predicted, predicting_log = folder / "predicted", folder / "predicting.log"
    seconds = []
    for each in (run, folder / "second"):
        done = subject.train(each, environment=watch(each, log=log) if each is run else None)
        _require_well(done)
        seconds.append(done.seconds)
    marks = fingerprint(run)
    anew = folder / "second"
    if wrong := difference(anew, marks):
        raise RuntimeError(f"two runs that nobody disturbed differ: {wrong}")
    _require_well(subject.train(anew, resume=True, environment=watch(anew, log=anew_log)))
    predicted.mkdir()
    _require_well(subject.predict(run, predicted / _PREDICTIONS, environment=watch(predicted, log=predicting_log)))
    return Undisturbed(
        run=run,
        marks=marks,
        seconds=min(seconds),
        operations=read_log(log, run) if log.exists() else [],
        operations_anew=read_log(anew_log, anew) if anew_log.exists() else [],
        operations_predicting=read_log(predicting_log, predicted) if predicting_log.exists() else [],
        predictions=(predicted / _PREDICTIONS).read_bytes(),
        files_predicted=frozenset(path.relative_to(predicted).as_posix() for path in predicted.rglob("*")),
    )


def _require_well(done: Done) -> None:
    if wrong := told_wrong(done, code=0):
        raise RuntimeError(f"a command that nobody disturbed: {wrong}")


def _named(when: str, operation: Operation) -> str:
    return f"{when} operation {operation.number} ({operation.name} {operation.new_path or operation.path})"


def _not_killed(done: Done) -> str:
    return "" if done.code == _KILLED else f"it was not killed: exit code {done.code}, {done.err.strip()[-300:]}"


def _no_shim() -> str:
    raise Skip(_NO_SHIM)
