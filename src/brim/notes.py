"""Describe what brim tells a person while it works: a text, how much it matters, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

# warning: something changes what is learned, or from which rows. plan: what the run takes; its topic is its label.
# note: good to know. detail: an automatic choice with its reason, or useful to few. status: what is being done, until
# the next status. work: the same, once everything is planned. rest: where to find the notes that were not shown.
Kind: TypeAlias = Literal["warning", "plan", "note", "detail", "status", "work", "rest"]


Say: TypeAlias = Callable[[str], None]  # takes a line for a person; a plain string counts as a note


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
