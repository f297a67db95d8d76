"""Describe what brim tells a person while it works, and put it on a card of a few lines.

A note has a text, a rank, which says how much it matters, and a topic.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from brim.units import format_count

# warning: something changes what is learned, or from which rows. plan: what the run takes; its topic is its label.
# note: good to know. detail: an automatic choice with its reason, or useful to few. status: what is being done, until
# the next status. work: the same, once everything is planned. rest: where to find the notes that were not shown. begin:
# of several runs one begins, whose notes make a card of their own.
Kind: TypeAlias = Literal["warning", "plan", "note", "detail", "status", "work", "rest", "begin"]


Say: TypeAlias = Callable[[str], None]  # takes a line for a person; a plain string counts as a note


OnBatch: TypeAlias = Callable[[int], None]  # takes the number of rows that are done since it was last called


class Note(str):
    """Hold a line for a person, as a string, so that `print` and a list take it as it is.

    topic: warnings on the same topic share a line where there are too many for a line each. short: what is shown of it
    there; default: all of it.
    """

    __slots__ = ("kind", "short", "topic")
    kind: Kind
    topic: str
    short: str

    def __new__(cls, text: str, *, kind: Kind = "note", topic: str = "", short: str = "") -> Note:
        note = super().__new__(cls, text)
        note.kind, note.topic, note.short = kind, topic, short
        return note


def warning(text: str, *, topic: str, short: str = "") -> Note:
    """Return a note on something that changes what is learned: it is always shown."""
    return Note(text, kind="warning", topic=topic, short=short)


def as_warnings(texts: Iterable[str], *, topic: str) -> list[str]:
    """Turn each text into a warning."""
    return [warning(text, topic=topic) for text in texts]


def planned(label: str, text: str, *, short: str = "") -> Note:
    """Return a line on what the run takes: "memory: 13.0 GiB of 15.0 GiB". short: the text on the plan's card."""
    return Note(f"{label}: {text}", kind="plan", topic=label, short=short or text)


def status(text: str, *, is_planned: bool = False) -> Note:
    """Return a line on what is being done from now on: "planning". is_planned: no more notes on the plan will come."""
    return Note(text, kind="work" if is_planned else "status")


def kind_of(line: str) -> Kind:
    """Return the kind of a line; a plain string is a note."""
    return line.kind if isinstance(line, Note) else "note"


def is_told(line: str) -> bool:
    """Return whether a listener receives this line; the others only change the progress line or the card."""
    return kind_of(line) not in ("status", "work", "rest")


def topic_of(line: str) -> str:
    """Return what the line is about."""
    return line.topic if isinstance(line, Note) else ""


def short_of(line: str) -> str:
    """Return what is shown of the line where several share one."""
    return (line.short if isinstance(line, Note) else "") or line


MOST_LINES = 8  # of a card


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


_LABELS = ("model", "data", "batch", "memory", "parts", "runs", "host", "time")


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
