"""Show what brim does while it works, on the command line and in Python: notes, status, steps, rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Protocol

from brim.errors import InputError, Problem
from brim.notes import Say, is_told, kind_of, short_of, topic_of
from brim.report.progress import LiveLine, RowProgress, TrainProgress
from brim.train import Observer, Record
from brim.units import format_count

MOST_LINES = 8  # before the first step


# How many lines there may be once the notes on a topic are shown: what comes later has room left, one line a topic.
_MOST_UNTIL = {"configuration": 2, "rows": 2, "run": 3}


_MOST_BEFORE_END = MOST_LINES - 2  # one for what comes last, one for where the others are


_MATTER = ("warning", "plan")


def show(line: str) -> None:
    """Show what brim does: notes on stderr, or in a notebook's cell, and a line that says how far it has come.

    The default of `say`. With `say=None` nothing is shown; a function of your own is given each note, and nothing else.
    """
    if is_told(line):
        Screen()(line)


class Listener(Observer, Protocol):
    """Hears notes, what is being done, the steps of a run, and how many rows are done."""

    def __call__(self, line: str) -> None: ...

    def advance(self, num_rows: int) -> None:
        """So many more rows are done."""


@contextmanager
def listening(say: Say | None, *, is_short: bool = False) -> Iterator[Listener]:
    """Whoever listens to what is done meanwhile. is_short: as `Screen` has it, where brim's own screen does.

    Raises InputError for what cannot be called.
    """
    given: object = say
    if given is not None and not callable(given):
        expected = "a function that takes a line, such as print, or None for silence"
        raise InputError(Problem(what=f"say is {say!r}", expected=expected, fix="leave it out to see what is done"))
    if say is show:
        with Screen(is_short=is_short) as screen:
            yield screen
    else:
        yield say if isinstance(say, Screen) else _Ear(say)


class Screen:
    """Notes and progress for people.

    stream: default: stderr; in a notebook the cell's stdout, since stderr is shown there as if something had failed.
    is_short: before the first step at most eight lines, those that matter first. hint: how to see the other notes.
    """

    def __init__(self, stream: IO[str] | None = None, *, is_short: bool = False, hint: str = "") -> None:
        in_notebook = stream is None and _in_notebook()
        self._line = LiveLine(stream or (sys.stdout if in_notebook else sys.stderr), in_notebook=in_notebook)
        self._steps, self._rows = TrainProgress(self._line), RowProgress(self._line)
        self._digest = Digest(hint=hint) if is_short else None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_digest()
        self._line.clear()

    def __call__(self, line: str) -> None:
        """Show a note, or what is being done from now on."""
        if self._digest is not None:
            self._print(self._digest.take(line))
        elif is_told(line):
            self._print([line])
        if kind_of(line) == "status":
            self._rows.begin(line)

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._end_digest()
        self._steps.start(first_step=first_step, total_steps=total_steps, total_samples=total_samples)

    def write(self, record: Record) -> None:
        self._steps.write(record)

    def close(self) -> None:
        self._steps.close()

    def advance(self, num_rows: int) -> None:
        self._rows.advance(num_rows)

    def _end_digest(self) -> None:
        if self._digest is not None:
            self._print(self._digest.end())

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._line.print(line)


class Digest:
    """The notes before the first step in at most eight lines.

    What matters is shown before the next thing is done: where it would take too many lines, the notes on one topic
    share one, in short. At the end the others are shown as far as there is room, and the last line counts what is left.
    Afterwards each note is shown as it comes, but for details.
    """

    def __init__(self, *, hint: str = "") -> None:
        self._hint, self._rest = hint, ""
        self._matter: list[str] = []
        self._others: list[str] = []
        self._num_details = self._num_shown = 0  # details, and notes that were shown in short
        self._has_ended = False

    def take(self, line: str) -> list[str]:
        """What is to be shown now that this is said."""
        kind = kind_of(line)
        if kind == "status":
            return self._flushed()
        if kind == "rest":
            self._rest = line
        elif kind == "detail":
            self._num_details += not self._has_ended
        elif self._has_ended:
            return [line]
        else:
            (self._matter if kind in _MATTER else self._others).append(line)
        return []

    def end(self) -> list[str]:
        """What is left to be shown before the first step."""
        if self._has_ended:
            return []
        lines = self._flushed(most=MOST_LINES - 1)
        self._has_ended, room = True, MOST_LINES - self._num_shown
        num_left = self._num_details + len(self._others)
        shown = self._others if num_left == len(self._others) <= room else self._others[: room - 1]
        num_left -= len(shown)
        if num_left:
            where = " or ".join(filter(None, (self._rest, self._hint)))
            told = format_count(num_left, "more note")
            return [*lines, *shown, f"{told}: {where}" if where else told]
        return [*lines, *shown]

    def _flushed(self, *, most: int | None = None) -> list[str]:
        """What matters of what was said, as far as there is room so early."""
        if not self._matter or self._has_ended:
            return []
        if most is None:
            most = max(_MOST_UNTIL.get(topic_of(line), _MOST_BEFORE_END) for line in self._matter)
        if self._num_shown >= most:
            return []
        groups = in_lines(self._matter, room=most - self._num_shown)
        lines = [_joined(group) for group in groups]
        self._num_details += sum(len(group) > 1 and short_of(note) != note for group in groups for note in group)
        self._matter, self._num_shown = [], self._num_shown + len(lines)
        return lines


def in_lines(notes: Sequence[str], *, room: int) -> list[list[str]]:
    """The notes of each line, of so many at most: those on a topic together where there is no room for each."""
    if len(notes) <= room:
        return [[note] for note in notes]
    by_topic: dict[str, list[str]] = {}
    for note in notes:
        by_topic.setdefault(topic_of(note), []).append(note)
    lines = list(by_topic.values())
    return lines if len(lines) <= room else [*lines[: room - 1], [note for said in lines[room - 1 :] for note in said]]


def _joined(notes: Sequence[str]) -> str:
    """One note as it is, several in short."""
    return notes[0] if len(notes) == 1 else "; ".join(map(short_of, notes))


def both(first: Callable[[int], None], second: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return what tells a number of rows to both; to the first alone where there is no second."""

    def tell(num_rows: int) -> None:
        first(num_rows)
        if second is not None:
            second(num_rows)

    return tell


class _Ear:
    """A function of somebody else's, which is given the notes; None: nobody is."""

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
    """Whether this runs in a kernel of IPython's, whose output is shown beneath a cell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
