"""A full disk, folders that may not be written to: what stands is not lost, and brim says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults import Settings, Trial
from faults.cases import Case, Skip, spread, trials
from faults.shim import read_log, watch
from faults.subject import Subject, difference, digests, fingerprint, make_subject, told_wrong

LIMIT, FULL, PREDICT, READ_ONLY = "disk-limit", "disk-full", "disk-predict", "disk-read-only"
_SHORT = {LIMIT: 2, PREDICT: 1}
_NUM_SIZES = 12  # of the small disk
_FORMATS = ("jsonl", "csv", "parquet")
_LIMITED = 0o555


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A run at three moments; each trial works on a copy."""

    begun: Path | None  # after the third checkpoint of four; None where the process cannot be killed there
    finished: Path
    marks: dict[str, str]
    predictions: dict[str, bytes]  # by format
    sizes_predicted: dict[str, set[int]]  # by format: bytes of the files that a prediction writes


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    (settings.folder / "project").mkdir()
    subject = make_subject(settings.folder / "project", settings.brim)
    yield from trials(_Disk(subject, settings, _stages(subject, settings.folder)).cases(), settings)


class _Disk:
    def __init__(self, subject: Subject, settings: Settings, stages: Stages) -> None:
        self._subject, self._settings, self._stages = subject, settings, stages
        self._number = 0

    def cases(self) -> Iterator[Case]:
        yield from self._some(LIMIT, list(self._limited()))
        yield from self._full()
        yield from self._some(PREDICT, list(self._predictions()))
        yield from self._read_only()

    def _some(self, row: str, cases: list[Case]) -> list[Case]:
        if not self._settings.short:
            return cases
        return [cases[number] for number in spread(len(cases), _SHORT[row], seed=self._settings.seed)]

    def _limited(self) -> Iterator[Case]:
        sizes = {path.stat().st_size for path in self._stages.finished.rglob("*") if path.is_file()}
        stages = {"new": None, "begun": self._stages.begun, "finished": self._stages.finished}
        for limit in sorted({max(0, size - less) for size in sizes for less in (0, 1)}):
            for name, stage in stages.items():
                if name == "new" or stage is not None:
                    yield Case(
                        row=LIMIT,
                        name=f"no file over {limit:,} bytes, {name} run",
                        judge=partial(self._with_limit, limit, stage),
                    )

    def _with_limit(self, limit: int, stage: Path | None) -> str:
        run = self._copy(stage)
        before = digests(run)
        failed = self._subject.train(run, resume=stage is not None, limit_file_bytes=limit)
        wrong = "" if failed.code == 0 else told_wrong(failed, code=1) or _message_wrong(failed.err)
        return wrong or lost_from(before, run) or self._with_room(run, stage)

    def _with_room(self, run: Path, stage: Path | None) -> str:
        """What was there is whole: it predicts, where it did, and is continued to the undisturbed end."""
        if stage == self._stages.finished:
            wrong = self._predicts_as_before(run)
            if wrong:
                return wrong
        done = self._subject.train(run, resume=True)
        wrong = told_wrong(done, code=0) or ("damaged" in done.err and done.err) or difference(run, self._stages.marks)
        if not wrong:
            shutil.rmtree(run)
        return str(wrong or "")

    def _predicts_as_before(self, run: Path) -> str:
        output = run.with_suffix(".jsonl")
        predicted = self._subject.predict(run, output)
        return told_wrong(predicted, code=0) or (
            "" if output.read_bytes() == self._stages.predictions["jsonl"] else "it predicts otherwise"
        )

    def _full(self) -> Iterator[Case]:
        whole = sum(path.stat().st_size for path in self._stages.finished.rglob("*") if path.is_file())
        for number in range(1 if self._settings.short else _NUM_SIZES):
            size = whole * (number + 1) // _NUM_SIZES
            yield Case(row=FULL, name=f"a disk of {size:,} bytes", judge=partial(self._on_small_disk, size))

    def _on_small_disk(self, size: int) -> str:
        with _disk(self._settings.folder / f"disk-{size}", size) as (place, make_room):
            run = place / "run"
            failed = self._subject.train(run)
            if failed.code == 0:
                return difference(run, self._stages.marks)
            wrong = told_wrong(failed, code=failed.code if failed.code == 2 and not run.exists() else 1)
            wrong = wrong or _message_wrong(failed.err)
            make_room()
            done = self._subject.train(run, resume=True)
            return wrong or told_wrong(done, code=0) or difference(run, self._stages.marks)

    def _predictions(self) -> Iterator[Case]:
        for kind in _FORMATS:
            sizes = self._stages.sizes_predicted[kind]
            for limit in sorted({size - less for size in sizes for less in (0, 1)}):
                yield Case(
                    row=PREDICT,
                    name=f"{kind}, no file over {limit:,} bytes",
                    judge=partial(self._predict_with_limit, kind, limit),
                )

    def _predict_with_limit(self, kind: str, limit: int) -> str:
        folder = self._new("")
        folder.mkdir()
        output, whole = folder / f"p.{kind}", self._stages.predictions[kind]
        done = self._subject.predict(self._stages.finished, output, limit_file_bytes=limit)
        wrong = "" if done.code == 0 else told_wrong(done, code=1) or _message_wrong(done.err)
        if not wrong and output.exists() != (done.code == 0):
            wrong = "a file, and it says that there is none, or the reverse"
        wrong = wrong or told_wrong(self._subject.predict(self._stages.finished, output, resume=True), code=0)
        return wrong or ("" if output.read_bytes() == whole else "another file")

    def _read_only(self) -> Iterator[Case]:
        def case(name: str, judge: Callable[[], str]) -> Case:
            return Case(row=READ_ONLY, name=name, judge=judge)

        yield case("the folder that a new run is to stand in", self._closed_above)
        if self._settings.short:
            return
        yield case("the folder of predictions", self._closed_output)
        for stage in (self._stages.begun, self._stages.finished):
            if stage is None:
                continue
            for below, code in ((".", 2), ("checkpoints", 1), ("tensorboard", 1), ("model", 1)):
                if (stage / below).is_dir() and not (below == "checkpoints" and stage == self._stages.finished):
                    name = f"{stage.name} run: {'itself' if below == '.' else below}"
                    yield case(name, partial(self._closed, stage, below, code))

    def _closed_above(self) -> str:
        folder = self._new("")
        folder.mkdir()
        with _closed(folder):
            done = self._subject.train(folder / "run", with_permissions=True)
            left = list(folder.iterdir())
        return told_wrong(done, code=2) or _message_wrong(done.err) or (f"left: {left}" if left else "")

    def _closed_output(self) -> str:
        folder = self._new("")
        folder.mkdir()
        with _closed(folder):
            done = self._subject.predict(self._stages.finished, folder / "p.jsonl", with_permissions=True)
        return told_wrong(done, code=2) or _message_wrong(done.err)

    def _closed(self, stage: Path, below: str, code: int) -> str:
        run = self._copy(stage)
        before = digests(run)
        with _closed(run / below):
            failed = self._subject.train(run, resume=True, with_permissions=True)
        wrong = told_wrong(failed, code=code) or _message_wrong(failed.err) or lost_from(before, run)
        if not wrong and code == 2 and digests(run) != before:
            wrong = "something was changed"
        return wrong or self._with_room(run, stage)

    def _copy(self, stage: Path | None) -> Path:
        run = self._new("")
        if stage is not None:
            shutil.copytree(stage, run)
        return run

    def _new(self, ending: str) -> Path:
        self._number += 1
        return self._settings.folder / f"run-{self._number}{ending}"


def _stages(subject: Subject, folder: Path) -> Stages:
    finished, begun, log = folder / "finished", folder / "begun", folder / "operations.log"
    done = subject.train(finished, environment=watch(finished, log=log))
    if wrong := told_wrong(done, code=0):
        raise RuntimeError(f"a run that nobody disturbed: {wrong}")
    if log.exists():
        operations = read_log(log, finished)
        shown = [o.number for o in operations if (o.new_path or "").startswith("checkpoints/step-")][2]
        done_with = next(o.number for o in operations if o.number > shown and o.path == "metrics.jsonl")  # older went
        subject.train(begun, environment=watch(begun, kill_after=done_with))
    predictions, sizes = {}, {}
    for kind in _FORMATS:
        place = folder / f"predicted-{kind}"
        place.mkdir()
        subject.predict(finished, place / f"p.{kind}")
        predictions[kind] = (place / f"p.{kind}").read_bytes()
        sizes[kind] = {path.stat().st_size for path in place.rglob("*") if path.is_file()}
    return Stages(
        begun=begun if begun.exists() else None,
        finished=finished,
        marks=fingerprint(finished),
        predictions=predictions,
        sizes_predicted=sizes,
    )


def _message_wrong(said: str) -> str:
    """brim's last message names what went wrong, a place and what to do."""
    message = said.rpartition("brim: ")[2]
    if "/" not in message or "fix: " not in message:
        return f"no place or no fix in {message.strip()!r}"
    return ""


def lost_from(before: dict[str, str], run: Path) -> str:
    """Which file of a run's checkpoints or model is not what it was. A checkpoint may go once a newer one is there."""
    now = digests(run)
    newest, newest_before = (
        max((name.split("/")[1] for name in names if name.startswith("checkpoints/step-")), default="")
        for names in (now, before)
    )
    lost = [
        name
        for name in before
        if name.startswith(("model/", "checkpoints/step-")) and now.get(name) != before[name]
        if name in now or name.startswith("model/") or newest <= newest_before
    ]
    return f"lost: {', '.join(lost)}" if lost else ""


@contextmanager
def _closed(folder: Path) -> Iterator[None]:
    mode = folder.stat().st_mode
    folder.chmod(_LIMITED)
    try:
        yield
    finally:
        folder.chmod(mode)


@contextmanager
def _disk(place: Path, size: int) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file system of its own in memory, and what makes room on it."""
    if os.geteuid() != 0:
        raise Skip("mounting a small disk needs root")
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        raise Skip("mounting a small disk is not permitted here")

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], capture_output=True, check=True)

    try:
        yield place, make_room
    finally:
        subprocess.run(["umount", str(place)], capture_output=True, check=True)
