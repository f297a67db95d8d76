"""Keep a prediction's job in a folder beside its output, with all that is needed to resume it.

A job's fingerprint holds, as names and values, all that a response depends on beside its prompt. A job can only be
resumed with the same fingerprint.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from brim.config import Choice
from brim.config.text import mask_secrets
from brim.errors import InputError, OutputError
from brim.infer import Journal
from brim.models.folders import CONFIG, WEIGHTS
from brim.notes import Say
from brim.session import Session, with_choices
from brim.storage import make_folder, remove_folder, sha256, sync, write_text, writing
from brim.train import package_versions
from brim.workflows.runs import flat, json_lines, read_json, template_texts, with_day

_FORMAT = 1  # of the files in the folder


_SHOWN = 12  # differences that a message names


class JobFolder:
    """Name the paths in a job's folder."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(f".{output.name}.job")
        self.job = self.path / "job.json"  # written when the job begins, and never again
        self.responses = self.path / "responses.journal"
        self.scores = self.path / "scores.journal"
        self.sittings = self.path / "sittings.jsonl"  # a line when a process begins to generate, and one when it ends
        self.outputs = self.path / "outputs.json"  # digests of what this job put in place, or was about to
        self.assembled = self.path / f"output{output.suffix}"  # the output before it is put in place

    @property
    def exists(self) -> bool:
        return self.job.is_file()

    def is_finished(self) -> bool:
        """Return whether the output was put in place, and no row has been generated since."""
        return bool(read_json(self.outputs).get("finished", False))


def check_job(output: Path, *, resume: bool) -> None:
    """Raise OutputError, before any work is done, for what must neither be overwritten nor continued."""
    folder = JobFolder(output)
    if output.exists() or output.is_symlink():
        _check_existing(folder, resume=resume)
    elif folder.exists and not folder.is_finished() and not resume:
        raise OutputError(
            what="a prediction to this output was begun and not finished; nothing was changed",
            where=str(output),
            fix=f"add --resume to continue it, or remove {folder.path} to start again",
        )
    if folder.path.is_symlink() or (folder.path.exists() and not folder.exists and not _is_ours(folder)):
        raise OutputError(
            what="the folder that the job would be kept in holds other files; nothing was changed",
            where=str(folder.path),
            fix="remove it, or name another output",
        )


class Job:
    """Hold a prediction on disk that this process works on."""

    def __init__(self, folder: JobFolder, *, responses: Journal, scores: Journal) -> None:
        self.folder, self.responses, self.scores = folder, responses, scores

    def note(self, event: str, **what: Any) -> None:
        """Note that this process "begins" to generate rows, from when on the job is unfinished, or "ends" to."""
        if event == "begins":
            self._note_outputs(self._digests(), finished=False)
            what = {"time": time.time(), **what}
        _note_sitting(self.folder, {"event": event, **what})

    def sittings(self) -> list[dict[str, Any]]:
        """Return what all processes that worked on this job noted, with a line for each that was killed."""
        return _lines(self.folder.sittings)

    def is_in_place(self) -> bool:
        """Return whether the output is what has been assembled."""
        output = self.folder.output
        return output.exists() and sha256(output) == sha256(self.folder.assembled)

    def put_in_place(self) -> None:
        """Move what has been assembled to the output's place, unless the file there is the same."""
        assembled, output = self.folder.assembled, self.folder.output
        digest = sha256(assembled)
        with writing("the output", output):
            if self.is_in_place():
                assembled.unlink()
            else:
                # First both digests: a kill before the rename, or after it, leaves a file that is known as this job's.
                self._note_outputs([*self._digests()[-1:], digest], finished=False)
                assembled.replace(output)
                sync(output.parent)
        self._note_outputs([digest], finished=True)

    @contextmanager
    def reopened(self) -> Iterator[tuple[Journal, Journal]]:
        """Open its journals again, after the job is done. Raises OutputError where they are gone."""
        if not self.folder.responses.is_file():
            raise OutputError(what="what was predicted is gone", where=str(self.folder.path))
        with Journal(self.folder.responses) as responses, Journal(self.folder.scores) as scores:
            yield responses, scores

    def _digests(self) -> list[str]:
        digests: list[str] = read_json(self.folder.outputs).get("sha256", [])
        return digests

    def _note_outputs(self, digests: list[str], *, finished: bool) -> None:
        with writing("the job", self.folder.outputs):
            write_text(self.folder.outputs, json.dumps({"sha256": digests, "finished": finished}) + "\n")


@contextmanager
def open_job(output: Path, now: Fingerprint, *, resume: bool, key: str | None, say: Say) -> Iterator[Job]:
    """Open the job of this output: continued, or begun.

    Raises OutputError where another process works on it, or it was begun with settings that give other responses.
    """
    folder = JobFolder(output)
    with ExitStack() as stack:
        stack.enter_context(_held(folder))
        check_job(output, resume=resume)  # again: another process may have come and gone since the first time
        if folder.exists and not resume:
            say(f"the output of an earlier prediction is gone from {output}: the prediction starts from the first row")
            with writing("the job", folder.path):
                remove_folder(folder.path)
            stack.enter_context(_held(folder))
        try:
            if folder.exists:
                for line in _allowed_changes(folder, now, key=key):
                    say(line)
            else:
                if resume:
                    say(f"nothing to continue at {output}: the prediction starts from the first row")
                _begin(folder, now, key=key)
            _close_sitting(folder)
            responses = stack.enter_context(Journal(folder.responses))
            scores = stack.enter_context(Journal(folder.scores))
            if responses.num_torn_bytes:
                say(
                    f"the last {responses.num_torn_bytes:,} bytes of {folder.responses} are not whole (a kill, or "
                    "damage); the rows that they held are generated again"
                )
            yield Job(folder, responses=responses, scores=scores)
        except BaseException:
            if not (folder.responses.is_file() and folder.responses.stat().st_size > Journal.EMPTY_BYTES):
                shutil.rmtree(folder.path, ignore_errors=True)  # nothing that could be continued
            raise


def _check_existing(folder: JobFolder, *, resume: bool) -> None:
    """Raise OutputError for an output that exists, unless it is this job's and is to be resumed."""
    where = str(folder.output)
    if not resume:
        what = "the output file exists already; nothing was changed"
        go_on = "add what is missing with --resume, in Python with resume=True, or name another"
        fix = go_on if folder.exists else "name another"
        raise OutputError(what=what, where=where, fix=fix)
    if not folder.exists:
        raise OutputError(
            what="the output file exists already, without a job beside it to resume; nothing was changed",
            where=where,
            expected=f"the folder {folder.path.name}, which brim leaves beside what it has predicted",
            fix="name another output, or move this file away",
        )
    is_file = folder.output.is_file() and not folder.output.is_symlink()
    if not is_file or sha256(folder.output) not in read_json(folder.outputs).get("sha256", []):
        raise OutputError(
            what="the output file is not the one that this job wrote: it is of another run, or was changed since; "
            "nothing was changed",
            where=where,
            fix="move it away, or name another output; with --resume the job then writes its own file there again",
        )


def _begin(folder: JobFolder, now: Fingerprint, *, key: str | None) -> None:
    with writing("the job", folder.job):
        for left in (folder.responses, folder.scores, folder.sittings, folder.outputs):
            left.unlink(missing_ok=True)
        job = {"format": _FORMAT, "key": key, "versions": package_versions(), "fingerprint": now}
        write_text(folder.job, json.dumps(job, indent=1) + "\n")


def _allowed_changes(folder: JobFolder, now: Fingerprint, *, key: str | None) -> list[str]:
    """Return notes on what has changed since the job was begun. Raises OutputError for what gives other responses."""
    job = _read_job(folder)
    changed = differences(job["fingerprint"], json.loads(json.dumps(now)))
    if job["key"] != key:
        named = [f"the column `{name}`" if name else "their numbers" for name in (job["key"], key)]
        changed.append(f"rows were identified by {named[0]}, and now are by {named[1]} (--key)")
    if changed:
        more = [f"and {len(changed) - _SHOWN:,} more"] if len(changed) > _SHOWN else []
        raise OutputError(
            what="the prediction cannot be continued: what its responses depend on has changed since it began\n"
            + "\n".join(f"    {line}" for line in [*changed[:_SHOWN], *more]),
            where=str(folder.output),
            fix="restore it, or write to another output; to start again here, remove "
            f"{folder.path}" + (" and the output" if folder.output.exists() else ""),
        )
    versions = package_versions()
    return [
        f"{name} was {before} when this prediction began and is now {versions.get(name)}: responses may differ"
        for name, before in job["versions"].items()
        if versions.get(name) != before
    ]


def _close_sitting(folder: JobFolder) -> None:
    """Note, of a process that was killed, until when it wrote, before anything else is written."""
    sittings = _lines(folder.sittings)
    if not sittings or sittings[-1]["event"] == "ends":
        return
    written = folder.responses.stat().st_mtime if folder.responses.is_file() else 0.0
    _note_sitting(folder, {"event": "ends", "seconds": max(0.0, written - sittings[-1]["time"]), "killed": True})


@contextmanager
def _held(folder: JobFolder) -> Iterator[None]:
    """Keep other processes from the job's folder meanwhile. The system frees the lock of a killed process."""
    with writing("the job", folder.path):
        make_folder(folder.path)
        descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), folder.path.stat()):
                raise BlockingIOError  # whoever had it has put another in its place
        except (BlockingIOError, FileNotFoundError):
            raise OutputError(
                what="another process is writing to this output; nothing was changed",
                where=str(folder.output),
                fix="wait until it has ended, or name another output",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _is_ours(folder: JobFolder) -> bool:
    """Return whether a folder without a job is what a kill left of one that was about to begin."""
    return folder.path.is_dir() and all(entry.name == ".job.json.tmp" for entry in folder.path.iterdir())


def _read_job(folder: JobFolder) -> dict[str, Any]:
    job = read_json(folder.job)
    if job.get("format") != _FORMAT:
        raise InputError(
            what="the prediction that was begun here was written by another version of brim, or is damaged",
            where=str(folder.path),
            fix="remove the folder to start again, or continue with the version that began it",
        )
    return job


def _note_sitting(folder: JobFolder, line: Mapping[str, Any]) -> None:
    """Write a line of its own, even after one that a kill has cut off."""
    with writing("the job", folder.sittings), folder.sittings.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [line for line in json_lines(path) if "event" in line]


Fingerprint: TypeAlias = dict[str, Any]


# Where files are, what the model runs on, how batches are partitioned and what happens to rows that cannot be used. The
# prompts are compared row by row. A model that is only run computes by its own operators, whatever it was trained by.
_NO_RESULT = (
    "dataset",
    "base_model",
    "adapter.pretrained_adapter_weights",
    "chat.template",
    "backend.",
    "memory.",
    "model_parameters.kernels",
    "trainer.",
    "generation.engine",
    "generation.merge_adapter",
    "prompt.retrieval.",
    "preprocessing.on_bad_row",
    "preprocessing.on_overlong",
    "preprocessing.drop_unlearnable",
    "preprocessing.max_dropped_fraction",
)


_OF_ROWS = re.compile(r"(in|out)put_features\.\d+\.preprocessing\.missing_value_strategy")


_ENGINE = "generation.engine"


# Labels are looked for in the responses when the output is put together.
_WHICH_LABEL = (
    "output_features.0.type",
    "output_features.0.decoder.",
    "output_features.0.preprocessing.fallback_label",
    "output_features.0.preprocessing.vocab",
)


_WHICH_ROWS = ("preprocessing.split", "preprocessing.sample_ratio", "preprocessing.sample_size")


_BASE_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "vocab*", "merges*", "*.py", "*/*.jinja")


# Larger files are identified by their size and samples: reading 16 GB takes as long as many a job.
_WHOLE_BYTES = 64 * 2**20


_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


def fingerprint(session: Session, *, split: str) -> Fingerprint:
    """Collect the keys of the configuration that change a response, and digests of the files of base and adapter."""
    config = flat(mask_secrets(session.config.model_dump(mode="json")))
    decoder = session.config.output_features[0].categories
    others: tuple[str, ...] = _WHICH_ROWS if split == "full" else ()
    if decoder is None or not decoder.constrain_to_vocabulary:
        others += _WHICH_LABEL
    kept = {key: value for key, value in config.items() if not (_is_without_effect(key) or key.startswith(others))}
    template = template_texts(session)
    return {
        **kept,
        "--split": split,
        **_other_numbers(session),
        **({} if template is None else {"the chat template": hashlib.sha256(template.as_one().encode()).hexdigest()}),
        **_base_files(session),
        **_adapter_files(session),
    }


def _other_numbers(session: Session) -> dict[str, str]:
    """Name the engine where it changes the samples: vLLM draws otherwise from a row's seed than all other engines."""
    generation = session.config.generation
    samples = generation.do_sample and generation.temperature > 0
    return {_ENGINE: "vllm"} if samples and generation.engine == "vllm" else {}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what differs: "generation.top_p: 0.9 before, 1.0 now"; of files and texts only their names."""
    lines = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        # An earlier version may have kept more; the engine is there only where it has an effect.
        if old != new and (name == _ENGINE or not _is_without_effect(name)):
            is_content = name.startswith("the ")
            lines.append(name if is_content else f"{name}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines


def _is_without_effect(key: str) -> bool:
    return key.startswith(_NO_RESULT) or _OF_ROWS.fullmatch(key) is not None


def _base_files(session: Session) -> dict[str, str]:
    """Return digests of the files of a local folder; of a model from the Hub its commit, which fixes its files."""
    folder = session.folder
    if folder.name == str(folder.path):
        return {f"the base model's {name}": digest for name, digest in _files(folder.path, _BASE_FILES)}
    return {"the base model's commit on the Hub": folder.path.name}


def _adapter_files(session: Session) -> dict[str, str]:
    adapter = session.config.trained_adapter
    files = () if adapter is None else _files(Path(adapter), (CONFIG, WEIGHTS))
    return {f"the adapter's {name}": digest for name, digest in files}


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        yield path.relative_to(folder).as_posix(), _digest_of_file(path)


def _digest_of_file(path: Path) -> str:
    """Return the content's digest; of a large file that of its size and of samples, its ends among them."""
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, sampled: {digest.hexdigest()}"


def as_begun(session: Session, output: Path) -> Session:
    """Return the session with what a continued job was begun with, where the configuration leaves it open.

    That is the day, where the chat template asks for one; the engine, unless it was vLLM, which may not be here; and
    whether the adapter was merged, since merged weights round otherwise.
    Raises OutputError where the configuration says otherwise on the last.
    """
    folder, key = JobFolder(output), "generation.merge_adapter"
    session = _with_day(session, folder)
    about: dict[str, Any] = next(
        (line.get("about", {}) for line in _lines(folder.sittings) if line["event"] == "begins"), {}
    )
    config, merged = session.config, about.get("merge_adapter", False)
    if about.get("engine") not in ("slots", "static"):
        return session
    if config.generation.engine == "auto":
        config = config.having(_ENGINE, about["engine"])
    if config.trained_adapter is not None and config.generation.merge_adapter not in ("auto", merged):
        was, now = ("merged" if each else "not merged" for each in (merged, config.generation.merge_adapter))
        raise OutputError(
            what=f"the prediction cannot be continued: the adapter was {was} when it began, and {key} has it {now}",
            where=str(output),
            fix=f"set {key}: auto, or write to another output",
        )
    begun = Choice(key=key, value=merged, reason="as the prediction began")
    return with_choices(replace(session, config=config), [begun])


def _with_day(session: Session, folder: JobFolder) -> Session:
    def day() -> str | None:
        return _read_job(folder)["fingerprint"].get("chat.date") if folder.exists else None

    return with_day(session, day, reason="the day on which the prediction began")
