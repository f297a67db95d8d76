"""Advice and lengths in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brim.data import Source
    from brim.data.advice import Finding
    from brim.data.advice.histogram import Bin

_SHOWN = 3  # places of a finding
_BAR_CHARACTERS = 40


def advice_lines(findings: Sequence[Finding], *, name: str, width: int) -> Iterator[str]:
    """Each finding as what, what to do and where, wrapped. name: the data's, which then stands once a line."""
    if not findings:
        yield "advice: none"
        return
    yield "advice (it stops nothing; docs/data-advice.md has the reasons, --rows the rows):"
    for number, finding in enumerate(findings, start=1):
        yield from wrapped(f"{number:2}. {finding.what}", width)
        yield from wrapped(f"    → {finding.fix}", width, indent=6)
        if finding.places:
            yield from wrapped(f"    {_places(finding, name)}", width)


def histogram_lines(bins: Iterable[Bin], *, title: str, width: int) -> Iterator[str]:
    """One line a bin: lengths, rows, and a bar whose full width is the fullest bin."""
    bins = list(bins)
    if len(bins) < 2:
        return
    labels = [f"{each.first:,}–{each.last:,}" if each.first < each.last else f"{each.first:,}" for each in bins]
    counts = [f"{each.num_rows:,}" for each in bins]
    label_width, count_width = max(len(title), *map(len, labels)), max(len("rows"), *map(len, counts))
    most = max(each.num_rows for each in bins)
    room = min(_BAR_CHARACTERS, width - label_width - count_width - 4)
    yield f"{title:>{label_width}}  {'rows':>{count_width}}"
    for label, count, each in zip(labels, counts, bins, strict=True):
        bar = "█" * -(-each.num_rows * room // most)
        yield f"{label:>{label_width}}  {count:>{count_width}}  {bar}".rstrip()


def write_advice_rows(findings: Iterable[Finding], source: Source, path: Path) -> None:
    """Write one line for each row of each finding: the row's number, what it repeats, and where both stand."""
    import pandas as pd

    from brim.api.prediction import write_predictions

    lines = [
        {
            "advice": finding.kind,
            "row": row,
            "place": source.locate(row),
            "like_row": like,
            "like_place": None if like is None else source.locate(like),
        }
        for finding in findings
        for row, like in zip(finding.rows.tolist(), _likes(finding), strict=True)
        if row != like
    ]
    columns = ["advice", "row", "place", "like_row", "like_place"]
    write_predictions(pd.DataFrame(lines, columns=columns, dtype=object), path)


def _likes(finding: Finding) -> list[int | None]:
    return [None] * len(finding.rows) if finding.like is None else finding.like.tolist()


def _places(finding: Finding, name: str) -> str:
    shown = ", ".join(finding.places[:_SHOWN])
    for mark in (f"{name}:", f"{name}, row "):
        at = shown.find(mark) + len(mark)
        if at >= len(mark):
            shown = shown[:at] + shown[at:].replace(mark, "")
    num_more = finding.num_places - len(finding.places[:_SHOWN])
    return f"{shown} and {num_more:,} more" if num_more > 0 else shown


def wrapped(text: str, width: int, indent: int = 4) -> list[str]:
    """A text's lines, the later ones indented; a path longer than a line stays whole."""
    return textwrap.wrap(
        text, width=max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
