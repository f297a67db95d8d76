"""Show what brim does while it works, on the command line and in Python: notes, status, steps, rows."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Protocol

from brim.errors import InputError
from brim.notes import Say, is_told, kind_of, short_of, topic_of
from brim.report.progress import LiveLine, RowProgress, TrainProgress
from brim.train import Observer, Record
from brim.units import format_count

MOST_LINES = 8  # before the first step


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
        self._card = PlanCard(hint=hint) if is_short else None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_card()
        self._line.clear()

    def __call__(self, line: str) -> None:
        """Show a note, or what is being done from now on."""
        if self._card.take(line) if self._card is not None else is_told(line):
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

    def _end_card(self) -> None:
        for label, text in () if self._card is None else self._card.end():
            self._line.print(wrapped(label, text, width=self._line.width))


class PlanCard:
    """Collect the notes before the first step into a card of at most eight labelled lines.

    What the run takes comes first, a line each: model, data, batch, memory, time. What changes what is learned is never
    left out: such notes are shortened and share lines where they would take too many. Other notes are shown as far as
    they fit, and the last line counts the rest and says where they are. After the card, each note is shown as it comes,
    except for details.
    """

    def __init__(self, *, hint: str = "") -> None:
        self._hint, self._rest = hint, ""
        self._facts: dict[str, list[str]] = {}
        self._warnings: list[str] = []
        self._others: list[str] = []
        self._num_details = 0
        self._is_shown = False

    def take(self, line: str) -> bool:
        """Collect a note; return whether to show it now, by itself, because the card has been shown."""
        kind = kind_of(line)
        if kind == "rest":
            self._rest = line
        elif kind == "detail":
            self._num_details += 1
        elif self._is_shown:
            return is_told(line)
        elif kind == "plan":
            self._facts.setdefault(topic_of(line), []).append(line)
        elif kind == "warning":
            self._warnings.append(line)
        elif is_told(line):
            self._others.append(line)
        return False

    def end(self) -> list[tuple[str, str]]:
        """Return the card's lines, each a label and a text; nothing if they have been returned before."""
        if self._is_shown:
            return []
        self._is_shown = True
        of_rows = [note for note in self._warnings if topic_of(note) == _OF_ROWS]
        of_others = [note for note in self._warnings if topic_of(note) != _OF_ROWS]
        lines = [(label, self._facts[label]) for label in _LABELS if label in self._facts]
        if of_rows:
            place = next((number for number, (label, _) in enumerate(lines) if label == "data"), len(lines) - 1)
            lines.insert(place + 1, ("" if lines else "data", of_rows))
        grouped = in_lines(of_others, most=MOST_LINES - 1 - len(lines))
        lines += [("" if number else "watch", group) for number, group in enumerate(grouped)]
        shortened = sum(short_of(note) != note for note in self._warnings)
        num_left, capacity = self._num_details + shortened + len(self._others), MOST_LINES - len(lines)
        shown = self._others if num_left == len(self._others) <= capacity else self._others[: capacity - 1]
        lines += [("" if number else "note", [note]) for number, note in enumerate(shown)]
        card = [(label, "; ".join(map(short_of, notes))) for label, notes in lines]
        num_left -= len(shown)
        if num_left:
            where = " or ".join(filter(None, (self._rest, self._hint)))
            card.append(("more", ": ".join(filter(None, (format_count(num_left, "note"), where)))))
        return card


_OF_ROWS = "rows"  # topic of the notes on what became of rows, which stand below the data


_LABELS = ("model", "data", "batch", "memory", "time")


_LABEL_CHARACTERS = 8  # the longest label, and two spaces before the text


_MOST_CHARACTERS = 100  # of a line on a wide terminal


def wrapped(label: str, text: str, *, width: int) -> str:
    """Return a line of a card; where it is wider than the screen, it is wrapped and aligned below its text."""
    width = max(min(width, _MOST_CHARACTERS), 3 * _LABEL_CHARACTERS)
    lines = textwrap.wrap(text, width - _LABEL_CHARACTERS, break_long_words=False, break_on_hyphens=False)
    return f"{label:<{_LABEL_CHARACTERS}}" + f"\n{'':{_LABEL_CHARACTERS}}".join(lines)


def in_lines(notes: Sequence[str], *, most: int) -> list[list[str]]:
    """Put the notes on at most so many lines: one for each note, or else one for each topic."""
    if len(notes) <= most:
        return [[note] for note in notes]
    by_topic: dict[str, list[str]] = {}
    for note in notes:
        by_topic.setdefault(topic_of(note), []).append(note)
    lines = list(by_topic.values())
    return lines if len(lines) <= most else [*lines[: most - 1], [note for line in lines[most - 1 :] for note in line]]


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
