"""How many bytes a run may take on a device, and how many of them it leaves free."""

from __future__ import annotations

from dataclasses import dataclass

from brim.errors import ConfigError, Problem
from brim.units import format_bytes, parse_bytes

_MIB = 2**20
# Of the budget. A trace was 0.25 to 0.35% below what an A100 then showed; between traces 0.5% more can be missing.
PREDICTION_SHARE = 0.01
# One kind of card (A100) shows 0.53 GiB outside PyTorch in most processes and 1.00 with more libraries loaded.
OUTSIDE_SPREAD_BYTES = 480 * _MIB
# What the C library holds beyond what lives, once it maps large blocks by themselves: planning/heap_settings.py.
HEAP_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one device. A cap on allocated bytes comes of it once the allocator's own overhead is known."""

    device: str  # as the catalogue or the driver names it; "cpu"
    limit_bytes: int  # that the run may take in all, what lies outside PyTorch included
    outside_bytes: int  # of them outside PyTorch's allocator: CUDA context, libraries; on a CPU the process as it is
    margin_bytes: int  # left free, since a prediction can be off
    limit_reason: str  # "of 16.0 GiB that the device has", "memory.budget", "RLIMIT_AS", …
    margin_reason: str

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's allocator may reserve."""
        return self.limit_bytes - self.outside_bytes - self.margin_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes that the run cannot go beyond, and who says so."""

    num_bytes: int  # in all, what lies outside PyTorch included
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What is left free where the user does not say: a share of what PyTorch may take, and bytes."""

    share: float
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A device as a run finds it."""

    device: str
    title: str  # for people
    memory_bytes: int  # that the device has
    limits: tuple[Limit, ...]  # at least one
    outside_bytes: int
    margin: Margin


def decide(room: Room, *, budget: str | float = "auto", margin: str | float = "auto") -> Budget:
    """budget, margin: as in the configuration: auto, bytes with a unit, or a share of the device or of the budget.

    Raises ConfigError where the device is smaller than the budget, and where nothing would be left for the model.
    """
    limit = _limit(room, budget)
    left_bytes = limit.num_bytes - room.outside_bytes
    margin_bytes, reason = _margin(room.margin, margin, limit_bytes=limit.num_bytes, left_bytes=max(left_bytes, 0))
    decided = Budget(
        device=room.device,
        limit_bytes=limit.num_bytes,
        outside_bytes=room.outside_bytes,
        margin_bytes=margin_bytes,
        limit_reason=limit.reason,
        margin_reason=reason,
    )
    if decided.reserved_bytes <= 0:
        raise ConfigError(_nothing_left(decided, is_asked=budget != "auto"))
    return decided


def cpu_margin(*, returns_at_once: bool) -> Margin:
    """returns_at_once: the C library maps each tensor by itself, and keeps nothing that is freed."""
    if returns_at_once:
        return Margin(share=PREDICTION_SHARE, num_bytes=0, reason="a prediction can be off by 1%")
    return Margin(share=HEAP_SHARE, num_bytes=0, reason="the C library keeps up to 15% of it, freed")


def cuda_margin(*, outside_spread_bytes: int = OUTSIDE_SPREAD_BYTES) -> Margin:
    """outside_spread_bytes: by which what lies outside PyTorch may exceed what is counted for it."""
    return Margin(
        share=PREDICTION_SHARE,
        num_bytes=outside_spread_bytes,
        reason=f"a prediction can be off by 1%, and what lies outside PyTorch by {format_bytes(outside_spread_bytes)}",
    )


def _limit(room: Room, asked: str | float) -> Limit:
    least = min(room.limits, key=lambda limit: limit.num_bytes)
    if asked == "auto":
        return least
    num_bytes = round(asked * room.memory_bytes) if isinstance(asked, float) else parse_bytes(str(asked))
    if num_bytes > room.memory_bytes:
        raise ConfigError(
            Problem(
                what=f"memory.budget is {format_bytes(num_bytes)}, and {room.title} has "
                f"{format_bytes(room.memory_bytes)}",
                fix="set memory.budget: auto, or less than the device has",
            )
        )
    if num_bytes > least.num_bytes:
        said = f"memory.budget says {format_bytes(num_bytes)}"
        return Limit(num_bytes=least.num_bytes, reason=f"{least.reason}; {said}, and so much is not there")
    return Limit(num_bytes=num_bytes, reason="memory.budget")


def _margin(auto: Margin, asked: str | float, *, limit_bytes: int, left_bytes: int) -> tuple[int, str]:
    if asked == "auto":
        return round(auto.share * left_bytes) + auto.num_bytes, auto.reason
    num_bytes = round(asked * limit_bytes) if isinstance(asked, float) else parse_bytes(str(asked))
    return num_bytes, "memory.margin"


def _nothing_left(budget: Budget, *, is_asked: bool) -> Problem:
    return Problem(
        what=f"of {format_bytes(budget.limit_bytes)} ({budget.limit_reason}), {format_bytes(budget.outside_bytes)} lie "
        f"outside PyTorch and {format_bytes(budget.margin_bytes)} are kept free: nothing is left for the model",
        where="memory.budget" if is_asked else "",
        fix="set a larger memory.budget, or a smaller memory.margin"
        if is_asked
        else "free memory there, or raise this limit",
    )
