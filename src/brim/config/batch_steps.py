"""`trainer.batch_schedule`: a table of steps of the effective batch, as text."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from brim.units import Duration, DurationUnit, parse_duration

_EXAMPLE = "such as 0sp:1024 250000sp:2048 1e6sp:4096"
_LARGEST = 2**40  # rows; Ludwig's bound on a batch


def parse_batch_steps(text: str) -> tuple[tuple[Duration, int], ...]:
    """'0sp:1024 250000sp:2048 1e6sp:4096': from when on, and how many rows; all times in one unit.

    The first begins at 0, which needs no unit; each later one after the one before. Raises ValueError.
    """
    if not text.strip():
        raise ValueError(f"it is empty: steps of the form DURATION:ROWS, {_EXAMPLE}")
    steps = [_step(part) for part in text.split()]
    first, later = steps[0], steps[1:]
    if first[0].amount != 0:
        raise ValueError(f"the first step begins at {first[0]}, and not at 0, {_EXAMPLE}")
    units = {start.unit for start, _ in later}
    if len(units) > 1:
        raise ValueError(f"steps in {' and '.join(sorted(units))}: a table has one unit")
    _require_order(steps)
    return ((Duration(Fraction(0), next(iter(units), first[0].unit)), first[1]), *later)


def _step(part: str) -> tuple[Duration, int]:
    start, colon, rows = part.partition(":")
    if not colon:
        raise ValueError(f"'{part}' is no step: DURATION:ROWS, {_EXAMPLE}")
    return _start(start), _rows(rows, part)


def _start(text: str) -> Duration:
    duration = Duration(Fraction(0), _UNIT_OF_BARE_0) if re.fullmatch("0+", text) else parse_duration(text)
    if duration.unit == "dur" and duration.amount == 1:
        raise ValueError(f"'{text}' is the end of the run, where no step begins")
    return duration


def _rows(text: str, part: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or not 1 <= int(text) <= _LARGEST:
        raise ValueError(f"'{part}' has '{text}' rows: a whole number of at least 1, in digits")
    return int(text)


def _require_order(steps: list[tuple[Duration, int]]) -> None:
    for (before, _), (after, _) in pairwise(steps):
        if after.amount <= before.amount:
            raise ValueError(f"{after} comes after {before}: each step begins later than the one before it")


_UNIT_OF_BARE_0: DurationUnit = "sp"
