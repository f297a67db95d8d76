"""Show what brim does while it works, on the command line and in Python: notes, status, steps, rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Protocol

from brim.errors import InputError
from brim.notes import PlanCard, Say, is_told, kind_of, wrapped
from brim.report.progress import LiveLine, RowProgress, TrainProgress
from brim.train import Observer, Record


def show(line: str) -> None:
    """Show what brim does: notes on stderr, or in a notebook's cell, and a line that says how far it has come.

    This is the default of `say`. With `say=None`, nothing is shown; a function of yours is given each note and nothing
    else.
    """
    if is_told(line):
        Screen()(line)


class Listener(Observer, Protocol):
    """Hear notes, what is being done, the steps of a run, and how many rows are done."""

    def __call__(self, line: str) -> None: ...

    def advance(self, num_rows: int) -> None:
        """Count so many more rows as done."""


@contextmanager
def listening(say: Say | None, *, is_short: bool = False) -> Iterator[Listener]:
    """Yield the listener for `say`; for the default it is brim's own screen.

    is_short: of that: see `Screen`. Raises InputError if `say` cannot be called.
    """
    given: object = say
    if given is not None and not callable(given):
        expected = "a function that takes a line, such as print, or None for silence"
        raise InputError(what=f"say is {say!r}", expected=expected, fix="leave it out to see what is done")
    if say is show:
        with Screen(is_short=is_short, hint="say=print") as screen:
            yield screen
    else:
        yield say if isinstance(say, Screen) else _NotesOnly(say)


class Screen:
    """Show notes and progress to people.

    stream: default: stderr; in a notebook, the cell's stdout, since stderr is shown there as if something had failed.
    is_short: show a card of at most eight lines before the first step or row. hint: how to see the other notes.
    """

    def __init__(self, stream: IO[str] | None = None, *, is_short: bool = False, hint: str = "") -> None:
        in_notebook = stream is None and _in_notebook()
        self._line = LiveLine(stream or (sys.stdout if in_notebook else sys.stderr), in_notebook=in_notebook)
        self._steps, self._rows = TrainProgress(self._line), RowProgress(self._line)
        self._hint, self._card = hint, PlanCard(hint=hint) if is_short else None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_card()
        self._line.clear()

    def __call__(self, line: str) -> None:
        """Show a note, or what is being done from now on."""
        if self._card is not None and kind_of(line) == "begin":
            self._end_card()
            self._line.print(line)
            self._card = PlanCard(hint=self._hint)
        elif self._card.take(line) if self._card is not None else is_told(line):
            self._line.print(line)
        if kind_of(line) == "work":
            self._end_card()
        if kind_of(line) in ("status", "work"):
            self._rows.begin(line)

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._end_card()
        self._steps.start(first_step=first_step, total_steps=total_steps, total_samples=total_samples)

    def write(self, record: Record) -> None:
        self._steps.write(record)

    def close(self) -> None:
        self._steps.close()

    def advance(self, num_rows: int) -> None:
        self._rows.advance(num_rows)

    def take_card(self) -> list[tuple[str, str]]:
        """Take the lines of the card, if it has not been shown, for somebody else to show."""
        self._line.clear()
        return [] if self._card is None else self._card.end()

    def _end_card(self) -> None:
        for label, text in () if self._card is None else self._card.end():
            self._line.print(wrapped(label, text, width=self._line.width))


class _NotesOnly:
    """Pass the notes to a function of the caller's, and ignore everything else. say: None for silence."""

    def __init__(self, say: Say | None) -> None:
        self._say = say

    def __call__(self, line: str) -> None:
        if self._say is not None and is_told(line):
            self._say(line)

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        pass

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass

    def advance(self, num_rows: int) -> None:
        pass


def _in_notebook() -> bool:
    """Return whether this runs in an IPython kernel, whose output is shown below a cell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
