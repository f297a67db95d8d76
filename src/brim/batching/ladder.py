"""The batch sizes that a search may try: all up to a largest one, or the powers of two among them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """1, 2, 3, … most; or 1, 2, 4, … up to it."""

    most: int
    power_of_two: bool = False

    def at_most(self, size: int) -> int:
        """The largest size that is not above `size`; the smallest one where there is none."""
        capped = max(1, min(size, self.most))
        return 1 << (capped.bit_length() - 1) if self.power_of_two else capped

    @property
    def beyond(self) -> int:
        """The first size that may not be tried."""
        return 2 * self.at_most(self.most) if self.power_of_two else self.most + 1

    def between(self, low: int, high: int) -> int | None:
        """The middle of the sizes above `low` and below `high`; None where there is none. low may be 0."""
        if not self.power_of_two:
            return (low + high) // 2 if high - low > 1 else None
        first, last = low.bit_length(), high.bit_length() - 1  # exponents: above low's, below high's
        return 1 << ((first + last) // 2) if first < last else None
