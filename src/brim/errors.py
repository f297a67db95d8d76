"""Define every error that brim raises on purpose, as one tree.

    BrimError                 exit code 1: the run failed
    ├── InputError            exit code 2: something that the user gave is wrong
    │   ├── ConfigError       the configuration: keys, types, values that contradict each other
    │   ├── DataError         the data set: a file, a column, a row
    │   ├── ModelError        the base model: a folder without weights, an unknown architecture
    │   ├── OutputError       the output: an unwritable place, a folder that holds something else
    │   └── NothingFitsError  the memory: a search for a batch size found that not even one row fits
    ├── CheckpointError       no checkpoint of a run could be read, or one could not be written
    ├── WriteError            another file could not be written: a full disk, a folder that is no longer writable
    ├── OutOfMemoryError      a single row does not fit; with more rows, a step is split into smaller micro-batches
    ├── ProbeError            a probe of a batch size is useless: it ran no step, or another size
    ├── ExportError           a model was not exported or uploaded: merging changed it too much, the Hub refused it
    └── Interrupted           exit code 130: Ctrl-C; what had been learned is in a checkpoint

An error carries one or more problems, so that everything that is wrong can be reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Describe one thing that is wrong: what, where, what was expected instead, and what to do."""

    what: str
    where: str = ""  # "config.yaml:7", "data.jsonl, row 12": whatever leads to the place fastest
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def problems_of(*checks: Callable[[], object]) -> list[Problem]:
    """Run all checks and return the problems of all that fail, so that one failure does not hide another."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def require_extra(extra: str, *packages: str, what: str, otherwise: str) -> None:
    """Import the packages of one of brim's extras. Raise InputError, with the command to install it, if one is missing.

    what: what needs them, such as "a picture". otherwise: what to do without them.
    """
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise InputError(
                what=f"{what} needs {package}, which cannot be imported: {error}",
                fix=f"pip install 'brim[{extra}]', or {otherwise}",
            ) from error


class BrimError(Exception):
    """The run failed. Each problem says what, where, what was expected and what to do.

    A single problem can be given by its words: InputError(what=…, fix=…).
    """

    exit_code = 1

    def __init__(self, *problems: Problem, what: str = "", where: str = "", expected: str = "", fix: str = "") -> None:
        if what:
            problems = (*problems, Problem(what=what, where=where, expected=expected, fix=fix))
        assert problems, "an error without a problem explains nothing"
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    @classmethod
    def raise_for(cls, problems: Iterable[Problem]) -> None:
        """Raise the error that holds these problems, if there are any."""
        if found := tuple(problems):
            raise cls(*found)


class InputError(BrimError):
    """There is something wrong with what the user gave."""

    exit_code = 2


class ConfigError(InputError):
    """The configuration is wrong."""


class DataError(InputError):
    """The data set is wrong."""


class ModelError(InputError):
    """The base model cannot be used."""


class OutputError(InputError):
    """The output cannot be written where it was asked for."""


class NothingFitsError(InputError):
    """Not even a batch of one row fits into memory."""


class ProbeError(BrimError):
    """A probe of a batch size is useless: it ran no step, or another size."""


class CheckpointError(BrimError):
    """No checkpoint could be read, or one could not be written."""


class WriteError(BrimError):
    """A file could not be written during the run."""


class OutOfMemoryError(BrimError):
    """A single row does not fit into memory, even alone."""


class ExportError(BrimError):
    """A model was not exported or uploaded: merging changed it too much, or the Hub refused it."""
