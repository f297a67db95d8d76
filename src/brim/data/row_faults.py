"""Rows that cannot be used: collected with their places, then an error or entries of the ledger, as the policy says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from brim.data.ledger import Entry
from brim.errors import DataError, Problem

BadRowPolicy: TypeAlias = Literal["auto", "error", "drop"]  # preprocessing.on_bad_row

ON_BAD_ROW = "preprocessing.on_bad_row"
WAY_OUT = f"set {ON_BAD_ROW}: drop to go on without such rows"
MAX_PROBLEMS = 5  # a message tells these and counts the others


@dataclass(slots=True, kw_only=True)
class RowFaults:
    """Why rows cannot be used, by key (the 0-based row number in the source).

    Whoever meets such a row adds it and leaves it out of what is passed on; once all rows are seen, `settle` decides.
    """

    locate: Callable[[int], str]
    problems: dict[int, Problem] = field(default_factory=dict)

    def add(self, key: int, problem: Problem) -> None:
        """Note a row's problem (its `where` is filled in from the key). The first of several counts."""
        self.problems.setdefault(key, problem)

    def settle(
        self,
        policy: BadRowPolicy,
        *,
        num_rows: int,
        name: str,
        split_of: Callable[[int], str | None],
        most: int = 0,
        unasked: str = "",
    ) -> list[Entry]:
        """The ledger's entries for the rows that are dropped, in the order of the rows.

        num_rows: the rows that were looked at. name: of the source. most: how many `auto` leaves out at most, and
        unasked: the setting that says so.
        Raises DataError with the places: under `error` for any bad row, under `auto` for more than `most`, under `drop`
        when more than half are bad, since then it is not the rows that are wrong, and dropping them is no way out.
        """
        is_error = policy == "error" or (policy == "auto" and len(self.problems) > most)
        if is_error and self.problems:
            shown = told(self.problems, self.locate, name)
            raise DataError(*(shown if is_majority(self.problems, num_rows) else with_way_out(shown, most)))
        require_minority(self.problems, self.locate, num_rows=num_rows, name=name)
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


def require_minority(
    problems: Mapping[int, Problem], locate: Callable[[int], str], *, num_rows: int, name: str
) -> None:
    """Raise DataError when more than half of the rows have a problem, whatever the policy."""
    if is_majority(problems, num_rows):
        raise DataError(*told(problems, locate, name), _too_many(len(problems), num_rows, name))


def is_majority(problems: Mapping[int, Problem], num_rows: int) -> bool:
    """Whether more than half of the rows have a problem."""
    return len(problems) * 2 > num_rows


def told(problems: Mapping[int, Problem], locate: Callable[[int], str], name: str) -> list[Problem]:
    """The first few problems with their places, and how many more there are."""
    keys = sorted(problems)
    shown = _fixed_once([replace(problems[key], where=locate(key)) for key in keys[:MAX_PROBLEMS]])
    num_more = len(keys) - len(shown)
    if num_more:
        shown.append(Problem(what=f"{num_more:,} more {'row is' if num_more == 1 else 'rows are'} bad", where=name))
    return shown


def _fixed_once(problems: list[Problem]) -> list[Problem]:
    """What is to be done, said at the last of the problems in a row for which it is the same."""
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
