"""The rows of a file that cannot be read, as they are met; where the file begins with nothing else, it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from brim.data.hidden_columns import fault_text
from brim.data.row_faults import MAX_PROBLEMS
from brim.errors import DataError, Problem

FIRST_ROWS = 20  # a file in which none of these can be read is of another kind, whatever follows


class Faulty(Exception):
    """A quick pass over a file has met what makes rows unreadable: they are to be judged one by one."""


@dataclass(slots=True, kw_only=True)
class Unreadable:
    """One pass over a file.

    explain: called before a file is refused, to raise what tells better what it is, if anything does.
    """

    name: str
    explain: Callable[[], None]
    _first: list[Problem] = field(default_factory=list)

    def fault(self, row: int, problem: Problem, *, where: str) -> str:
        """The cell of the column FAULT for this row. Raises DataError when the first rows are all unreadable."""
        if row == len(self._first) and row < FIRST_ROWS:
            self._first.append(replace(problem, where=where))
            if len(self._first) == FIRST_ROWS:
                self.explain()
                raise DataError(*self._first[:MAX_PROBLEMS], self._another_kind())
        return fault_text(problem)

    def _another_kind(self) -> Problem:
        return Problem(
            what=f"none of the first {FIRST_ROWS} rows can be read",
            where=self.name,
            expected="a file of the kind that its ending names",
        )
