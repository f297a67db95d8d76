"""A device's memory as squares of a GiB, or of several where they would be too many, filled by category."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from brim.report.categories import LOOKS, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GIB = 2**30
Sign: TypeAlias = Callable[[Part], tuple[str, str]]  # what is shown, and its style
_BEYOND = "#C00000"
_MOST_SQUARES = 2048  # of a device, or of one way to run


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One way to run, and what it takes."""

    name: str
    parts: Mapping[Part, int]  # bytes
    fits_on: Sequence[str] = ()  # devices

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def square_bytes_for(most_bytes: int) -> int:
    """A GiB, doubled until so many bytes are not too many squares."""
    square_bytes = GIB
    while most_bytes > _MOST_SQUARES * square_bytes:
        square_bytes *= 2
    return square_bytes


def squares(parts: Mapping[Part, int], *, square_bytes: int = GIB) -> list[Part]:
    """One entry a square, in the order of the parts: each square is what stands at its middle.

    As many squares as the whole rounds to; a part of less than half a square may have none.
    """
    total = sum(parts.values())
    found: list[Part] = []
    end, spans = 0, []
    for part, num_bytes in parts.items():
        end += num_bytes
        spans.append((end, part))
    for number in range((total + square_bytes // 2) // square_bytes):
        middle = number * square_bytes + square_bytes // 2
        found.append(next((part for end, part in spans if middle < end), spans[-1][1]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The squares in a terminal: those that are free empty, those beyond the device's memory marked.

    Where there are no colours, letters say what the squares are.
    """

    parts: Mapping[Part, int]  # bytes
    budget_bytes: int | None
    per_line: int
    legend_parts: Sequence[Part] | None = None  # None: those that have a square; empty: no legend

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        square_bytes = square_bytes_for(max(sum(self.parts.values()), self.budget_bytes or 0))
        filled = squares(self.parts, square_bytes=square_bytes)
        num_there = len(filled) if self.budget_bytes is None else self.budget_bytes // square_bytes
        num_all = max(len(filled), num_there)
        per_line = min(self.per_line, options.max_width // 2)
        sign = _letter if console.color_system is None else _square
        for first in range(0, num_all, per_line):
            line = Text()
            for number in range(first, min(first + per_line, num_all)):
                if number < len(filled):
                    text, style = sign(filled[number])
                    line.append(text, style=style).append("!" if number >= num_there else " ", style=f"bold {_BEYOND}")
                else:
                    line.append("□ " if sign is _square else "· ", style="dim")
            yield line
        parts = filled if self.legend_parts is None else self.legend_parts
        if parts:
            beyond = len(filled) > num_there
            yield legend(
                [part for part in LOOKS if part in parts],
                square_bytes=square_bytes,
                sign=sign,
                free=num_there > len(filled),
                beyond=beyond,
            )


def legend(parts: Sequence[Part], *, square_bytes: int, sign: Sign, free: bool, beyond: bool) -> Text:
    """What the squares stand for."""
    from rich.text import Text

    text = Text(f"each is {square_bytes // GIB:,} GiB: ")
    for number, part in enumerate(parts):
        shown, style = sign(part)
        text.append(", " if number else "").append(shown, style=style).append(f" {LOOKS[part].label}")
    if free:
        text.append(", □ free" if sign is _square else ", · free")
    if beyond:
        text.append(", ! beyond the device's memory")
    return text


def _square(part: Part) -> tuple[str, str]:
    return "■", LOOKS[part].colour


def _letter(part: Part) -> tuple[str, str]:
    return LOOKS[part].letter, ""
