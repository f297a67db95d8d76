"""Trials as a list that several processes share out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from faults import Settings, Trial


class Skip(Exception):
    """A trial cannot be done on this machine, for the reason given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trial to be."""

    row: str
    name: str
    judge: Callable[[], str]  # does it, and says what was wrong; "" where brim kept its promise


def trials(cases: Iterable[Case], settings: Settings) -> Iterator[Trial]:
    """Judge those cases that are this process's."""
    for number, case in enumerate(cases):
        if settings.is_mine(number):
            yield _trial(case)


def spread(number: int, wanted: int, *, seed: int) -> list[int]:
    """So many of the numbers from 0, evenly spread; which ones depends on the seed. All where there are no more."""
    if wanted >= number:
        return list(range(number))
    step = number / wanted
    offset = (7 * seed + int(step) // 2) % int(step)
    return sorted({min(number - 1, int(each * step) + offset) for each in range(wanted)})


def _trial(case: Case) -> Trial:
    try:
        why = case.judge()
    except Skip as skip:
        return Trial(row=case.row, case=case.name, outcome="skipped", why=str(skip))
    return Trial(row=case.row, case=case.name, outcome="failed" if why else "passed", why=why)
