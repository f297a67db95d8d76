"""Who hears of a run while it goes on: a seam between the loop and its logs and displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

Record = Mapping[str, Any]  # one line of metrics.jsonl; its fields stand in docs/run-folder.md


class Observer(Protocol):
    """Hears each record once, in order."""

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        """The loop is about to run the steps after `first_step`.

        total_steps: of the run; None where the effective batch follows what is measured. total_samples: rows that the
        whole run consumes.
        """

    def write(self, record: Record) -> None:
        """A step, an evaluation or an event happened."""

    def close(self) -> None:
        """The loop has ended, well or not."""


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
