"""Who hears of a run while it goes on: a seam between the loop and its logs and displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from brim.errors import InputError, Problem

Record = Mapping[str, Any]  # one line of metrics.jsonl; its fields stand in docs/run-folder.md


class Observer(Protocol):
    """Hears what happens in a run: `start` once, `write` for each record in order, `close` at the end.

    A class of your own that inherits from this one needs only the methods that it is interested in. They are called in
    the thread that trains, between steps, which wait for them; what they raise ends the run.
    """

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        """The loop is about to run the steps after `first_step`, which is 0 unless the run is continued.

        total_steps: of the run; None where the effective batch follows what is measured. total_samples: rows that the
        whole run consumes, counted with repetition.
        """

    def write(self, record: Record) -> None:
        """A step, an evaluation or an event happened: a line of metrics.jsonl as a mapping (docs/run-folder.md)."""

    def close(self) -> None:
        """The run has ended, well or not; also where it failed after `start`."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Several observers as one. Raises InputError for one that is none, such as a function."""

    members: Sequence[Observer]

    def __post_init__(self) -> None:
        for member in self.members:
            missing = [name for name in ("start", "write", "close") if not callable(getattr(member, name, None))]
            if missing or isinstance(member, type):
                raise InputError(_no_observer(member, missing))

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        for member in self.members:
            member.start(first_step=first_step, total_steps=total_steps, total_samples=total_samples)

    def write(self, record: Record) -> None:
        for member in self.members:
            member.write(record)

    def close(self) -> None:
        """All of them, even where one cannot."""
        with ExitStack() as stack:
            for member in reversed(self.members):
                stack.callback(member.close)


def _no_observer(given: object, missing: Sequence[str]) -> Problem:
    name = getattr(given, "__name__", None) or f"of the type {type(given).__name__}"
    kind = "the class " if isinstance(given, type) else ""
    lacks = f": it has no method {', '.join(missing)}" if missing else ""
    return Problem(
        what=f"the observer is {kind}{name}, which cannot hear a run{lacks}",
        expected="an object of a class that inherits from brim.Observer",
        fix="write a class with the methods that you need, and give an object of it: observer=MyObserver()",
    )
