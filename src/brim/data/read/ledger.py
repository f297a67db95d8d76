"""Record what was cut, dropped or filled in, row by row: nothing happens to a row silently.

Rows that cannot be used are collected with their places; then they are an error, or entries of the ledger, as the
policy says. A file that begins with nothing but rows that cannot be read is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DataError, Problem
from brim.notes import warning
from brim.storage import whole_file, writing
from brim.units import format_count

FIRST_ROWS = 20  # a file in which none of these can be read is of another kind, whatever follows


@dataclass(slots=True, kw_only=True)
class Unreadable:
    """Collect why rows of a file cannot be read. A file in which none of the first can be read is refused.

    explain: called before that, to raise an error that says better what the file is, if there is one.
    """

    name: str
    problems: dict[int, Problem]  # by row, without a place
    explain: Callable[[], None]
    _first: list[Problem] = field(default_factory=list)

    def add(self, row: int, problem: Problem, *, where: str) -> None:
        """Note a row's problem. Raises DataError when the first rows are all unreadable."""
        self.problems[row] = problem
        if row == len(self._first) and row < FIRST_ROWS:
            self._first.append(replace(problem, where=where))
            if len(self._first) == FIRST_ROWS:
                self.explain()
                what = f"none of the first {FIRST_ROWS} rows can be read"
                expected = "a file of the kind that its ending names"
                raise DataError(*self._first[:MAX_PROBLEMS], Problem(what=what, where=self.name, expected=expected))


ON_BAD_ROW = "preprocessing.on_bad_row"


WAY_OUT = f"set {ON_BAD_ROW}: drop to go on without such rows"


MAX_PROBLEMS = 5  # a message names these and counts the others


@dataclass(slots=True, kw_only=True)
class RowFaults:
    """Collect why rows cannot be used, by key (the 0-based row number in the source).

    Whoever meets such a row adds it and leaves it out of what is passed on; once all rows are seen, `settle` decides.
    """

    locate: Callable[[int], str]
    problems: dict[int, Problem] = field(default_factory=dict)

    def add(self, key: int, problem: Problem) -> None:
        """Note a row's problem, whose `where` is filled in from the key. The first of several counts."""
        self.problems.setdefault(key, problem)

    def settle(
        self,
        policy: Literal["auto", "error", "drop"],
        *,
        num_rows: int,
        name: str,
        split_of: Callable[[int], str | None],
        most: int = 0,
        unasked: str = "",
    ) -> list[Entry]:
        """Return the ledger's entries for the rows that are dropped, in the order of the rows.

        num_rows: the rows that were looked at. name: of the source. most: how many would be left out unasked, for the
        message. unasked: the setting that leaves them out so.
        Raises DataError with the places: under `drop` when more than half of the rows are bad, since something else is
        wrong then, and dropping them does not help; under the other policies for any bad row.
        """
        if policy != "drop" and self.problems:
            shown = first_of(self.problems, self.locate, name)
            raise DataError(*(shown if is_majority(self.problems, num_rows) else with_way_out(shown, most)))
        self.require_minority(num_rows, name)
        return [
            Entry(
                key=key,
                split=split_of(key),
                event="dropped_bad",
                why=f"{self.locate(key)}: {problem.what}",
                unasked=unasked,
            )
            for key, problem in sorted(self.problems.items())
        ]

    def require_minority(self, num_rows: int, name: str) -> None:
        """Raise DataError when more than half of the rows have a problem, whatever the policy."""
        if is_majority(self.problems, num_rows):
            raise DataError(*first_of(self.problems, self.locate, name), _too_many(len(self.problems), num_rows, name))


def is_majority(problems: Mapping[int, Problem], num_rows: int) -> bool:
    """Return whether more than half of the rows have a problem."""
    return len(problems) * 2 > num_rows


def first_of(problems: Mapping[int, Problem], locate: Callable[[int], str], name: str) -> list[Problem]:
    """Return the first few problems with their places, and one that counts the others."""
    keys = sorted(problems)
    shown = _fixed_once([replace(problems[key], where=locate(key)) for key in keys[:MAX_PROBLEMS]])
    num_more = len(keys) - len(shown)
    if num_more:
        shown.append(Problem(what=f"{format_count(num_more, 'more row is', 'more rows are')} bad", where=name))
    return shown


def _fixed_once(problems: list[Problem]) -> list[Problem]:
    """Keep of equal fixes in a row only the last."""
    following = [problem.fix for problem in problems[1:]] + [None]
    return [replace(each, fix="") if each.fix == fix else each for each, fix in zip(problems, following, strict=True)]


def with_way_out(problems: list[Problem], most: int = 0) -> list[Problem]:
    """Return the same problems, the last of which names the policy, too, and how many rows are left out without it."""
    *others, last = problems
    way_out = f"{WAY_OUT} (preprocessing.max_dropped_fraction leaves out up to {most:,})" if most else WAY_OUT
    return [*others, replace(last, fix=f"{last.fix}; or {way_out}" if last.fix else way_out)]


def _too_many(num_bad: int, num_rows: int, name: str) -> Problem:
    return Problem(
        what=f"{num_bad:,} of {num_rows:,} rows are bad, more than {ON_BAD_ROW}: drop leaves out",
        where=name,
        expected="a file of another kind, or other columns: at most half of the rows may be bad",
        fix="look at the first of them",
    )


EVENTS = {  # in the order of the summary, with the words for people
    "filled_missing": "had missing cells, which were filled",
    "filled_outlier": "had outliers, which were replaced",
    "dropped_bad": "were dropped, since they cannot be read or used",
    "dropped_missing": "were dropped: a cell that the prompt or the answer needs is missing",
    "dropped_outlier": "were dropped: a number is too far from the mean",
    "cut_text": "had a text cut",
    "cut_prompt": "had their prompt cut",
    "cut_answer": "had their answer cut",
    "cut_joined": "were cut as a whole (prompt and answer together)",
    "dropped_overlong": "were dropped, since the model's context is too short for them",
    "dropped_unlearnable": "were dropped: nothing of the answer is left to learn from",
}


_SHOWN = 3  # rows, or reasons, that the summary names; it counts the others


_CUTS = ("cut_text", "cut_prompt", "cut_answer", "cut_joined")


_SCHEMA = pa.schema(
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
    """Record one thing that happened to one row."""

    key: int  # 0-based row number in the source
    split: str | None  # None: dropped before the rows were split
    event: str  # one of EVENTS
    why: str
    tokens_before: int | None = None
    tokens_after: int | None = None
    place: str = ""  # of a row that `auto` leaves out, for the summary
    unasked: str = ""  # under `auto`, the setting that leaves out a bad row


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Hold entries in the order of the rows, and how many rows there were in all."""

    SCHEMA: ClassVar[pa.Schema] = _SCHEMA  # as a file

    num_rows: int
    entries: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def write(self, path: Path) -> None:
        """Write the ledger as parquet, whole or not at all. Raises WriteError."""
        columns = {name: [getattr(entry, name) for entry in self.entries] for name in self.SCHEMA.names}
        with writing("the ledger", path), whole_file(path) as temporary:
            pq.write_table(pa.table(columns, schema=self.SCHEMA), temporary)

    def left_out(self) -> list[Entry]:
        """Return why rows are left out, one entry a row."""
        return list({entry.key: entry for entry in self.entries if entry.event.startswith("dropped")}.values())

    def num_left_out(self) -> dict[str, int]:
        """Count the rows that are left out, by the event that took them away."""
        return dict(Counter(entry.event for entry in self.left_out()))

    def with_more(self, entries: Sequence[Entry]) -> Ledger:
        """Return the ledger with further entries of the same rows, in their order."""
        every = sorted([*self.entries, *entries], key=lambda entry: entry.key)
        return Ledger(num_rows=self.num_rows, entries=every)

    def summary(self) -> list[str]:
        """Return a line for each kind of event: how many rows, and for cuts the longest."""
        lines: list[str] = []
        for event, words in EVENTS.items():
            of_kind = [entry for entry in self.entries if entry.event == event]
            if of_kind:
                rows = f"{len(of_kind):,} of {self.num_rows:,} rows"
                line = f"{rows} {words}{_details(event, of_kind)}"
                lines.append(warning(line, topic="rows", short=f"{rows} {_in_short(event, of_kind)}"))
        return lines


def _in_short(event: str, entries: Sequence[Entry]) -> str:
    """Say what became of the rows: "cut to 512 tokens". Of rows that cannot be used, the first is named."""
    verb = event.partition("_")[0]
    if event == "dropped_bad":
        return f"{verb}: {entries[0].why}" + (f" and {len(entries) - 1:,} more" if len(entries) > 1 else "")
    left = {entry.tokens_after for entry in entries}
    return f"{verb} to {format_count(left.pop() or 0, 'token')}" if event in _CUTS and len(left) == 1 else verb


def _details(event: str, entries: Sequence[Entry]) -> str:
    """Name the longest cut, why bad rows were dropped, or the reason that all entries share."""
    longest = max(entries, key=lambda entry: entry.tokens_before or 0)
    if event in _CUTS:
        after = format_count(longest.tokens_after or 0, "token")
        return f": the longest from {longest.tokens_before:,} to {after} ({longest.why})"
    places = "".join(f"{entry.place}, " for entry in entries[:_SHOWN] if entry.place)
    if places and len(entries) > _SHOWN:
        places = f"{places[:-2]} and {len(entries) - _SHOWN:,} more, "
    if event == "dropped_overlong":
        return f": the longest of {format_count(longest.tokens_before or 0, 'token')} ({places}{longest.why})"
    if event == "dropped_bad":
        shown = [entry.why for entry in entries[:_SHOWN]]
        shown += [f"and {len(entries) - _SHOWN:,} more"] if len(entries) > _SHOWN else []
        return f" ({'; '.join([*shown, *filter(None, {entry.unasked for entry in entries})])})"
    reasons = Counter(entry.why for entry in entries).most_common()
    if len(reasons) == 1:
        return f" ({places}{reasons[0][0]})"
    return f" ({'; '.join(f'{why}: {count:,}' for why, count in reasons)})" if len(reasons) <= _SHOWN else ""
