"""Format and parse bytes, durations and counts as people read them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

DurationUnit: TypeAlias = Literal["ba", "ep", "sp", "tok", "dur"]


GIB = 2**30


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


_FACTORS: dict[str, int] = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)} | {
    unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))
}


def format_bytes(num_bytes: int) -> str:
    """Format bytes in the largest binary unit that leaves at least 1: 1536 -> '1.5 KiB'."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.1f} {_BINARY_UNITS[unit]}"


def gib(num_bytes: int) -> str:
    """Format bytes as GiB with two decimals; with three below 0.1 GiB."""
    value = num_bytes / GIB
    if num_bytes == 0:
        return "0"
    return f"{value:,.3f}" if 0 < abs(value) < 0.1 else f"{value:,.2f}"


def parse_bytes(text: str) -> int:
    """Parse '14GiB', '14.5 GiB', '16384MiB' (powers of 1024), '14 GB' (powers of 1000), '1024 B'. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2].lower() not in _FACTORS or math.isinf(float(match[1])):
        raise ValueError(f"'{text}' is not a number of bytes with a unit")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_seconds(seconds: float) -> str:
    """Format a duration: 0.0042 -> '4.2 ms', 3.2 -> '3.2 s', 95 -> '1 min 35 s', 7500 -> '2 h 5 min'."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def format_count(number: int, one: str, several: str = "") -> str:
    """Format a number with its noun: 1 -> '1 step', 2000 -> '2,000 steps'. several: a plural that is not `one` + s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def format_parameters(number: int) -> str:
    """Format a number of parameters as in models' names: 124_439_808 -> '124.4M', 7_241_732_096 -> '7.2B'."""
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.95 * factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)


@dataclass(frozen=True, slots=True)
class Duration:
    """Hold a length of training with its unit, named as in Composer.

    `ba` batches, `ep` epochs, `sp` samples (rows), `tok` real tokens, `dur` shares of the whole run. The amount is
    exact: 0.1dur of 1,600 rows is 160.
    """

    amount: Fraction
    unit: DurationUnit

    def __str__(self) -> str:
        return f"{self.amount.numerator if self.amount.denominator == 1 else float(self.amount)}{self.unit}"


def parse_duration(text: str) -> Duration:
    """Parse '500ba', '0.1dur', '2ep', '5000sp', '1e6tok'. Raises ValueError.

    Epochs and shares may be fractions, a share at most 1; the others are whole numbers, such as 1.5e6tok.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in get_args(DurationUnit):
        raise ValueError(
            f"'{text}' is not a duration: a number and a unit, ba (batches), ep (epochs), sp (samples), tok (tokens) "
            "or dur (share of the run), such as 500ba, 2ep, 5000sp, 1e6tok or 0.1dur"
        )
    duration = Duration(Fraction(match[1]), match[2])  # type: ignore[arg-type]
    if duration.unit == "dur" and duration.amount > 1:
        raise ValueError(f"'{text}' is longer than the run: a share from 0dur to 1dur")
    if duration.unit not in ("dur", "ep") and duration.amount.denominator != 1:
        raise ValueError(f"'{text}' is not a whole number of {_COUNTED[duration.unit]}")
    return duration


_COUNTED = {"ba": "batches", "sp": "samples", "tok": "tokens"}
