"""One bad input: what it changes in the workshop's project, how brim is called on it, and what brim must say."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from faults.forked import Done
from faults.workshop import DATA

Verb = Literal["check", "train", "evaluate", "predict", "resume", "export"]
WORKING: tuple[Verb, ...] = ("train", "evaluate", "predict")
ALL: tuple[Verb, ...] = ("check", *WORKING)

_SPARSE_BYTES = 1 << 32  # that take no room on the disk
MAX_LINES = 25
MAX_CPU_S = 10.0
MAX_IDLE_S = 30.0  # waiting, for a lock or for its turn on a busy machine
MAX_BYTES = 1 << 30  # above what the libraries take, resident


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One file or folder of the project made otherwise."""

    path: str
    content: bytes | None = None  # None: what `how` says
    how: Literal["write", "remove", "folder", "fifo", "link", "sparse", "cut", "change"] = "write"
    target: str = ""  # of a link
    old: bytes = b""  # what a change replaces by `content`
    num_bytes: int = 0  # that a cut leaves

    def apply(self, folder: Path) -> None:
        path = folder / self.path
        if self.how in ("cut", "change"):
            path.write_bytes(self._edited(path.read_bytes()))
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.how == "write":
            path.write_bytes(self.content or b"")
        elif self.how == "folder":
            path.mkdir()
        elif self.how == "fifo":
            os.mkfifo(path)
        elif self.how == "link":
            path.symlink_to(self.target)
        elif self.how == "sparse":
            with path.open("wb") as file:
                file.truncate(_SPARSE_BYTES)

    def _edited(self, content: bytes) -> bytes:
        if self.how == "cut":
            return content[: self.num_bytes]
        if self.old not in content:
            raise ValueError(f"{self.path} does not hold {self.old!r}")
        return content.replace(self.old, self.content or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput:
    """Something that a user, or somebody else's folder, gets wrong."""

    row: str  # of the report
    name: str  # what was done
    edits: tuple[Edit, ...] = ()
    overrides: tuple[str, ...] = ()
    dataset: str | None = DATA
    model: str = "config.yaml"  # or a run
    says: tuple[str, ...] = ()  # the place: one of these must stand in the message
    words: tuple[str, ...] = ()  # all of these must; blanks and line ends are alike, but in words with a line end
    arguments: tuple[str, ...] = ()  # of the command, where it is not made of the above
    verbs: tuple[Verb, ...] = ALL
    may_pass: tuple[Verb, ...] = ()  # verbs that need not notice
    codes: tuple[int, ...] = (2,)

    def command(self, verb: Verb) -> list[str]:
        """The arguments of `brim`."""
        if self.arguments:
            return list(self.arguments)
        data = [] if self.dataset is None else ["--dataset", self.dataset]
        ends = {
            "train": ["--output-directory", "new"],
            "predict": ["--output", "new.jsonl"],
            "resume": ["--resume"],
            "export": ["--merge", "--output", "new"],
        }
        if verb == "export":
            data = []
        name = "train" if verb == "resume" else verb
        return [name, self.model, *self.overrides, *data, *ends.get(verb, [])]


def fault_of(bad: BadInput, verb: Verb, done: Done, left: Iterable[str]) -> str:
    """What is wrong with brim's answer; empty where nothing is. left: files that were not there before, or changed."""
    said = done.out + done.err
    if done.timed_out:
        return f"still running after {done.seconds:.0f} s"
    if "Traceback" in said or "panicked at" in said:
        return "a traceback: " + (done.err.strip().splitlines() or ["nothing"])[-1][:200]
    if done.code < 0:
        return f"ended by signal {-done.code}"
    if done.cpu_s > MAX_CPU_S or done.seconds - done.cpu_s > MAX_IDLE_S:
        return f"took {done.cpu_s:.0f} s of CPU, and waited {done.seconds - done.cpu_s:.0f} s"
    if done.peak_bytes > MAX_BYTES:
        return f"took {done.peak_bytes >> 20} MiB"
    if done.code == 0:
        return "" if verb in bad.may_pass else "was accepted"
    if done.code not in bad.codes:
        return f"exit code {done.code}: {done.err[-200:]}"
    return _fault_of_message(bad, done.err) or _fault_of_rest(left)


def _fault_of_message(bad: BadInput, err: str) -> str:
    start = err.find("brim: ")
    message = err[start:] if start >= 0 else err
    if start < 0 and "Usage: " not in err:
        return f"no message: {err[-200:]}"
    if len(message.splitlines()) > MAX_LINES:
        return f"a message of {len(message.splitlines())} lines"
    if max(map(len, message.splitlines())) > 1_000:
        return f"a line of {max(map(len, message.splitlines()))} characters"
    if bad.says and not any(place in message for place in bad.says):
        return f"the place is not named: {message[:200]}"
    missing = [word for word in bad.words if word not in (message if "\n" in word else " ".join(message.split()))]
    if missing:
        return f"{missing} is not said: {message[:500]}"
    if not any(word in message for word in ("\n  expected: ", "\n  fix: ", "Usage: ")):
        return f"no way out is named: {message[:200]}"
    if any(ord(character) < 32 and character != "\n" for character in message):
        return f"control characters in the message: {message[:200]!r}"
    return ""


def _fault_of_rest(left: Iterable[str]) -> str:
    names = sorted(left)
    return f"left behind, or changed: {', '.join(names[:5])}" if names else ""


def state_of(folder: Path) -> set[tuple[str, int, int]]:
    """What is below a folder: names, and of what is no folder its size and the time of its last change."""
    found = set()
    for path in folder.rglob("*"):
        about = path.lstat()
        is_folder = path.is_dir() and not path.is_symlink()
        size_and_time = (0, 0) if is_folder else (about.st_size, about.st_mtime_ns)
        found.add((str(path.relative_to(folder)), *size_and_time))
    return found


def touched(before: set[tuple[str, int, int]], after: set[tuple[str, int, int]]) -> set[str]:
    """The names of what was made, changed or deleted."""
    return {name for name, *_ in before ^ after}
