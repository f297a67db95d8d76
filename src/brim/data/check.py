"""What a configuration makes of its data, in figures and in rendered rows, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.config import Config
from brim.data.encoder import TextEncoder
from brim.data.prepare import prepare
from brim.data.rows import TokenRow, TokenRows
from brim.data.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the rows of a split are, in tokens."""

    median: int
    p95: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """A split's size and lengths; the lengths are None where the split has no rows."""

    name: str
    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    prompt: Lengths | None
    answer: Lengths | None  # with its EOS
    total: Lengths | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a rendered row, and whether the model learns to write it."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row as the model sees it, decoded from its token ids."""

    key: int
    where: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `brim check` tells about the data."""

    name: str
    num_rows: int
    context_length: int | None
    splits: tuple[SplitReport, ...]
    events: tuple[str, ...]  # the ledger's summary: what was cut or dropped
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def check_data(
    config: Config, source: Source, encoder: TextEncoder, *, context_length: int | None, show: int = 0
) -> CheckReport:
    """Prepare the data as training would and describe it. show: how many rows to render, from the train split first.

    Raises DataError as `prepare`.
    """
    prepared = prepare(source, config, encoder, context_length=context_length)
    shown = [row for rows in prepared.splits.values() for row in rows[:show]][:show]
    return CheckReport(
        name=source.name,
        num_rows=source.table.num_rows,
        context_length=context_length,
        splits=tuple(_report(name, rows) for name, rows in prepared.splits.items()),
        events=tuple(prepared.ledger.summary()),
        notes=prepared.notes,
        samples=tuple(
            Sample(key=row.key, where=source.locate(row.key), segments=tuple(_segments(row, encoder))) for row in shown
        ),
    )


def _report(name: str, rows: TokenRows) -> SplitReport:
    return SplitReport(
        name=name,
        num_rows=len(rows),
        num_tokens=int(rows.lengths.sum()),
        num_supervised_tokens=int(rows.num_supervised.sum()),
        prompt=_lengths(rows.num_prompt_tokens),
        answer=_lengths(rows.lengths - rows.num_prompt_tokens),
        total=_lengths(rows.lengths),
    )


def _lengths(lengths: npt.NDArray[np.int64]) -> Lengths | None:
    if not len(lengths):
        return None
    median, p95, p99, longest = np.quantile(lengths, [0.5, 0.95, 0.99, 1.0], method="higher").tolist()
    return Lengths(median=median, p95=p95, p99=p99, max=longest)


def _segments(row: TokenRow, encoder: TextEncoder) -> Iterator[Segment]:
    """Runs of tokens that are alike in being learned, special tokens shown."""
    edges = np.flatnonzero(np.diff(row.supervised)) + 1
    for ids, marks in zip(np.split(row.input_ids, edges), np.split(row.supervised, edges), strict=True):
        if len(ids):
            text = encoder.decode(ids.tolist(), skip_special_tokens=False)
            yield Segment(text=text, supervised=bool(marks[0]))
