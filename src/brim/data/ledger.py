"""What was cut, dropped or filled in, row by row: nothing happens to a row in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from brim.files import whole_file, writing
from brim.notes import warning

EVENTS = {  # in the order of the summary, with the words for people
    "filled_missing": "had missing cells, which were filled",
    "dropped_bad": "were dropped, since they cannot be read or used",
    "dropped_missing": "were dropped: a cell that the prompt or the answer needs is missing",
    "cut_prompt": "had their prompt cut",
    "cut_answer": "had their answer cut",
    "cut_joined": "were cut as a whole (prompt and answer together)",
    "dropped_overlong": "were dropped, since the model's context is too short for them",
    "dropped_unlearnable": "were dropped: nothing of the answer is left to learn from",
}
_SHOWN = 3  # rows, or reasons, that the summary names; it counts the others
_CUTS = ("cut_prompt", "cut_answer", "cut_joined")
SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("split", pa.string()),
        ("event", pa.string()),
        ("why", pa.string()),
        ("tokens_before", pa.int64()),
        ("tokens_after", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that happened to one row."""

    key: int  # 0-based row number in the source
    split: str | None  # None: dropped before the rows were split
    event: str  # one of EVENTS
    why: str
    tokens_before: int | None = None
    tokens_after: int | None = None
    place: str = ""  # of a row that is left out without being asked for, to be told
    unasked: str = ""  # the setting that leaves out a bad row where nobody asked for it


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Entries in the order of the rows, and how many rows there were in all."""

    num_rows: int
    entries: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def write(self, path: Path) -> None:
        """As parquet, whole or not at all. Raises WriteError."""
        columns = {name: [getattr(entry, name) for entry in self.entries] for name in SCHEMA.names}
        with writing("the ledger", path), whole_file(path) as temporary:
            pq.write_table(pa.table(columns, schema=SCHEMA), temporary)

    def left_out(self) -> list[Entry]:
        """Why rows are not there, one entry a row."""
        return list({entry.key: entry for entry in self.entries if entry.event.startswith("dropped")}.values())

    def num_left_out(self) -> dict[str, int]:
        """How many rows are not there, by the event that took them away."""
        return dict(Counter(entry.event for entry in self.left_out()))

    def with_more(self, entries: Sequence[Entry]) -> Ledger:
        """The ledger with further entries of the same rows, in their order."""
        every = sorted([*self.entries, *entries], key=lambda entry: entry.key)
        return Ledger(num_rows=self.num_rows, entries=every)

    def summary(self) -> list[str]:
        """A line for each kind of event: how many rows, and for cuts the longest."""
        lines: list[str] = []
        for event, words in EVENTS.items():
            of_kind = [entry for entry in self.entries if entry.event == event]
            if of_kind:
                rows = f"{len(of_kind):,} of {self.num_rows:,} rows"
                told = f"{rows} {words}{_details(event, of_kind)}"
                lines.append(warning(told, topic="rows", short=f"{rows} {_in_short(event, of_kind)}"))
        return lines


def _in_short(event: str, entries: Sequence[Entry]) -> str:
    """What became of the rows, and the reason where all share one: "cut: max_sequence_length is 40"."""
    verb = event.partition("_")[0]
    shared = {entry.why for entry in entries}
    return f"{verb}: {shared.pop()}" if len(shared) == 1 and event != "dropped_bad" else verb


def _details(event: str, entries: Sequence[Entry]) -> str:
    """Which cut was the longest, why bad rows were dropped, or the reason that all entries share."""
    longest = max(entries, key=lambda entry: entry.tokens_before or 0)
    if event in _CUTS:
        return f": the longest from {longest.tokens_before:,} to {longest.tokens_after:,} tokens ({longest.why})"
    places = "".join(f"{entry.place}, " for entry in entries[:_SHOWN] if entry.place)
    if places and len(entries) > _SHOWN:
        places = f"{places[:-2]} and {len(entries) - _SHOWN:,} more, "
    if event == "dropped_overlong":
        return f": the longest of {longest.tokens_before:,} tokens ({places}{longest.why})"
    if event == "dropped_bad":
        shown = [entry.why for entry in entries[:_SHOWN]]
        shown += [f"and {len(entries) - _SHOWN:,} more"] if len(entries) > _SHOWN else []
        return f" ({'; '.join([*shown, *filter(None, {entry.unasked for entry in entries})])})"
    reasons = Counter(entry.why for entry in entries).most_common()
    if len(reasons) == 1:
        return f" ({places}{reasons[0][0]})"
    return f" ({'; '.join(f'{why}: {count:,}' for why, count in reasons)})" if len(reasons) <= _SHOWN else ""
