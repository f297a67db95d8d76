"""Who hears of a run while it goes on: a seam between the loop and its logs and displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

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
    """Several observers as one."""

    members: Sequence[Observer]

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
