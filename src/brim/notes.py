"""Describe what brim tells a person while it works: a text, how much it matters, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

# warning: it changes what is learned, or which rows are. plan: what the run takes; its topic is its label. note: good
# to know. detail: an automatic choice with its reason, or of use to few. status: what is being done at the moment,
# until the next one. work: the same, once everything is planned. rest: where the notes stand that were not shown.
Kind: TypeAlias = Literal["warning", "plan", "note", "detail", "status", "work", "rest"]


Say: TypeAlias = Callable[[str], None]  # takes a line that a person should see; one that is no Note is a note


class Note(str):
    """A line for a person. It is its text, so that `print` and a list take it as it is.

    topic: those that matter are put together by it where there are too many for a line each. short: what is shown of it
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
    """A note on what changes what is learned: it is always shown."""
    return Note(text, kind="warning", topic=topic, short=short)


def as_warnings(texts: Iterable[str], *, topic: str) -> list[str]:
    """Each of them as a warning."""
    return [warning(text, topic=topic) for text in texts]


def planned(label: str, text: str, *, short: str = "") -> Note:
    """Return a line on what the run takes: "memory: 13.0 GiB of 15.0 GiB". short: of the text, for the plan's card."""
    return Note(f"{label}: {text}", kind="plan", topic=label, short=short or text)


def status(text: str, *, is_planned: bool = False) -> Note:
    """Return what is being done from now on: "planning". is_planned: everything about it has been said."""
    return Note(text, kind="work" if is_planned else "status")


def kind_of(line: str) -> Kind:
    """A plain text is a note."""
    return line.kind if isinstance(line, Note) else "note"


def is_told(line: str) -> bool:
    """Whether it is for whoever listens, and not for the line that shows what is going on."""
    return kind_of(line) not in ("status", "work", "rest")


def topic_of(line: str) -> str:
    """What it is about."""
    return line.topic if isinstance(line, Note) else ""


def short_of(line: str) -> str:
    """What is shown of it beside others."""
    return (line.short if isinstance(line, Note) else "") or line
