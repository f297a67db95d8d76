"""Lay out the folder of a run: what stands where, and whether it may be written to."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from brim.errors import CheckpointError, InputError, OutputError, Problem
from brim.storage import MANIFEST, finish_replacing, is_half_replaced, make_folder, verified, write_text, writing

_PROBE = ".brim-can-write"


_CAP = "out-of-memory-{}.json"  # of a rank


_RECORDED_PACKAGES = (
    "brim", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "tokenizers", "safetensors", "numpy",
    "pyarrow",
)  # fmt: skip


class _Entry:
    """Give the path under this name as an attribute of a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, kind: type[RunFolder]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Name the paths in a run folder.

    CONTRACT: config.yaml, plan.json, metrics.jsonl, ledger.parquet, environment.json, checkpoints/, model/, README.md;
    and tensorboard/ and notes.txt.
    """

    path: Path

    @property
    def is_run(self) -> bool:
        """Say whether brim began a run here: plan.json is a run's first file. A config.yaml may be anybody's."""
        return self.plan.is_file() or any(self.checkpoints.glob("step-*/manifest.json"))

    config = _Entry("config.yaml")
    plan = _Entry("plan.json")
    metrics = _Entry("metrics.jsonl")
    ledger = _Entry("ledger.parquet")
    notes = _Entry("notes.txt")
    environment = _Entry("environment.json")
    checkpoints = _Entry("checkpoints")
    tensorboard = _Entry("tensorboard")
    model = _Entry("model")
    card = _Entry("README.md")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return a run that has been trained. Raises InputError when it is not a run, or has no model yet."""
        run = cls(path)
        if is_half_replaced(run.model):
            run._put_back()
        if not run.config.is_file() or not (run.is_run or run.model.is_dir()):
            raise InputError(
                what="this folder is not a run",
                where=str(path),
                expected="the folder that `brim train` wrote, or a configuration file",
                fix="name the run's folder (the one with plan.json and model/), or the YAML file",
            )
        if not run.model.is_dir():
            raise InputError(
                what="this run has no model yet", where=str(path), fix=f"finish it with `brim train {path} --resume`"
            )
        return run

    @classmethod
    def create(cls, path: Path, *, resume: bool) -> RunFolder:
        """Return the folder of a new run, still empty, or of the one to continue.

        Raises OutputError when it holds other things, or cannot be written to.
        """
        run = cls(path)
        run.check(resume=resume)
        try:
            make_folder(path)
            probe = path / _PROBE
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(_unwritable(path, error)) from error
        return run

    def check(self, *, resume: bool) -> None:
        """Refuse a place that cannot be written, or a folder that holds anything but a run to be continued.

        Nothing is written. Raises OutputError.
        """
        path = self.path
        try:
            if path.exists() and not path.is_dir():
                raise OutputError(
                    what="the output directory is a file", where=str(path), fix="choose another with --output-directory"
                )
            if path.is_dir() and _holds_anything(path) and not (resume and self.is_run):
                raise OutputError(_occupied(self))
            _require_writable(path)
        except OSError as error:
            raise OutputError(_unwritable(path, error)) from error

    @contextmanager
    def held(self, *, resume: bool) -> Iterator[None]:
        """Keep other processes from training in the folder meanwhile. The lock of a killed process ends with it.

        Raises OutputError when another one is training, or has just trained.
        """
        with _locked(self.path, fcntl.LOCK_EX) as is_ours:
            if not is_ours:
                raise OutputError(
                    what="another process is training in this folder; nothing was changed",
                    where=str(self.path),
                    fix="wait until it has ended, or choose another folder with --output-directory",
                )
            self.check(resume=resume)
            yield

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Keep processes from training in the folder while it is read. Nothing is written, and several may read.

        Raises InputError when a process is training.
        """
        with _locked(self.path, fcntl.LOCK_SH) as is_ours:
            if not is_ours:
                raise InputError(
                    what="a process is training in this folder, so what it holds is changing",
                    where=str(self.path),
                    fix="wait until it has ended, or stop it with Ctrl-C, which leaves a checkpoint",
                )
            yield

    def require_whole_model(self) -> None:
        """Raise CheckpointError where a file of the model is not what brim wrote; one without manifest is trusted."""
        if not (self.model / MANIFEST).is_file():
            return
        try:
            listed = set(verified(self.model))
            # What lies beside is read all the same: a chat template that was put there would change every prompt.
            there = {path.relative_to(self.model).as_posix() for path in self.model.rglob("*") if path.is_file()}
            strange = sorted(name for name in there - listed - {MANIFEST} if not Path(name).name.startswith("."))
            if strange:
                raise ValueError(f"{', '.join(strange)} came from elsewhere")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                what=f"the model of this run is damaged ({error})",
                where=str(self.model),
                expected=f"the files that its {MANIFEST} lists",
                fix=f"write it again with `brim train {self.path} --resume`; delete {MANIFEST} if you changed the "
                "model yourself",
            ) from error

    def write_environment(self, *, device: str) -> None:
        """Record what a run depends on beside its configuration."""
        environment: dict[str, Any] = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device,
            "packages": package_versions(),
        }
        self.write(self.environment, json.dumps(environment, indent=1) + "\n")

    def note_cap(self, rank: int, cutter: Mapping[str, Any]) -> None:
        """Leave a note on the limit of a rank that ran out of memory, for the next start. Raises WriteError."""
        self.write(self.path / _CAP.format(rank), json.dumps(cutter) + "\n")

    def take_caps(self) -> list[Mapping[str, Any]]:
        """Return the notes of `note_cap`, and delete them; a damaged one says nothing."""
        found = []
        for path in sorted(self.path.glob(_CAP.format("*"))):
            with suppress(ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        return found

    def write(self, path: Path, text: str) -> None:
        """Write one of the run's files, whole or not at all. Raises WriteError."""
        with writing(path.name, path):
            write_text(path, text)

    def _put_back(self) -> None:
        """Finish what a kill broke off between the two renames that replace a model, unless a process is training."""
        try:
            with _locked(self.path, fcntl.LOCK_EX) as is_ours:
                if is_ours:
                    finish_replacing(self.model)
        except OSError as error:
            raise OutputError(_unwritable(self.path, error)) from error


def package_versions() -> dict[str, str]:
    """Return the versions of packages that results depend on."""
    packages = {}
    for name in _RECORDED_PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return packages


def _require_writable(path: Path) -> None:
    """Raise OSError where the folder, or the nearest one that exists above it, takes no files."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _unwritable(path: Path, error: OSError) -> Problem:
    return Problem(
        what=f"the output directory cannot be written: {error.strerror or error}",
        where=str(path),
        fix="choose another with --output-directory",
    )


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock on the folder; yield whether it could be had."""
    descriptor = os.open(path, os.O_RDONLY)
    is_ours = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            is_ours = True
        yield is_ours
    finally:
        os.close(descriptor)


def _holds_anything(path: Path) -> bool:
    """Say whether there is more in a folder than what a kill in a run's first moments left."""
    return any(not (entry.name.startswith(".") and entry.name.endswith((".tmp", _PROBE))) for entry in path.iterdir())


def _occupied(run: RunFolder) -> Problem:
    if run.is_run:
        return Problem(
            what="there is a run in this folder already; nothing was changed",
            where=str(run.path),
            fix="continue it with --resume (in Python resume=True), or choose another folder with --output-directory",
        )
    return Problem(
        what="the output directory holds other things; nothing was changed",
        where=str(run.path),
        expected="a new or an empty folder",
        fix="choose another with --output-directory",
    )
