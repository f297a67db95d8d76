"""What came of trying one batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["fits", "out_of_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One size that was tried, and what came of it."""

    size: int
    steps: int  # that were run to their end; 0 with the outcome "fits" is a failure of the probe itself
    outcome: Outcome
    peak_bytes: int | None  # None: the device does not say, or the step did not end
    seconds: float


Fits: TypeAlias = Callable[[int], Probe]
