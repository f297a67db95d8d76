"""`memory`: how much of the device a run may take."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from brim.config.schema.base import Section, key
from brim.units import parse_bytes

_BUDGET = "auto, a size with its unit such as 14 GiB, or a share of the device above 0 and up to 1 such as 0.9"
_MARGIN = "auto, a size with its unit such as 500 MiB, or a share of the budget of at least 0 and below 1 such as 0.05"
_MOST_GIB = 4096  # a bare number up to here is meant in GiB or MiB, one above in bytes
MOST_BYTES = 2**60


def _budget(value: float | str) -> float | str:
    _require_bytes_or_share(value)
    if value != "auto" and (value <= 0 if isinstance(value, float) else parse_bytes(value) == 0):
        raise _refused("leave it out, or say how much the run may take")
    return value


def _margin(value: float | str) -> float | str:
    _require_bytes_or_share(value)
    if value == 1.0:
        raise _refused("nothing would be left; set 0.05 to leave a twentieth free")
    return value


def _require_bytes_or_share(value: float | str) -> None:
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise _refused(_with_unit(value) if value > 1 else "")
    elif value != "auto":
        try:
            num_bytes = parse_bytes(value)
        except ValueError:
            raise _refused(_meant(value)) from None
        if num_bytes > MOST_BYTES:
            raise _refused("no device has so much memory")


def _with_unit(number: float) -> str:
    """What a bare number above 1 may be meant as."""
    if number <= _MOST_GIB:
        more = f", or {number / 100:g} for the share" if 2 <= number <= 100 else ""
        return f"write the unit: {number:g} GiB or {number:g} MiB{more}"
    return f"write the unit: {number:.0f} B" if number <= MOST_BYTES else ""


def _meant(text: str) -> str:
    bare = text.strip().removesuffix("%").strip()
    try:
        number = float(bare)
    except ValueError:
        return ""
    if text.strip().endswith("%"):
        return f"write {number / 100:g}" if 0 <= number <= 100 else ""
    return f"write {number:g} without quotes" if 0 <= number <= 1 else _with_unit(number) if number > 1 else ""


def _refused(fix: str) -> PydanticCustomError:
    return PydanticCustomError("amount", "no amount of memory", {"fix": fix})


BudgetValue: TypeAlias = Annotated[Literal["auto"] | float | str, AfterValidator(_budget)]
MarginValue: TypeAlias = Annotated[Literal["auto"] | float | str, AfterValidator(_margin)]


class MemoryConfig(Section):
    """How much of the device a run may take. Memory decides how a batch is cut, never what is learned."""

    budget: BudgetValue = key(
        "auto",
        "What the run may take in all, with what lies outside PyTorch. `auto`: all that is free on the device when the "
        "run starts; for a device that is not at hand, all that it has.",
        brim=True,
        expected=_BUDGET,
    )
    margin: MarginValue = key(
        "auto",
        "What of the budget is left free, since a prediction can be off. `auto`: chosen by what was measured on the "
        "device before, and more where nothing was.",
        brim=True,
        expected=_MARGIN,
    )
