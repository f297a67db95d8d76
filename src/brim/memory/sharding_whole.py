"""Parameters that are not cut: each rank, or the only one, holds all of them all the time."""

from __future__ import annotations

from collections.abc import Sequence

from brim.memory.sharding_units import Weight


class WholeParameters:
    """Nothing is gathered, and gradients stay as they were computed."""

    def shard(self, weight: Weight) -> int:
        """Bytes that the rank keeps of a parameter."""
        return weight.elements * weight.element_bytes

    def gather(self, layer: int | None, *, backward: bool) -> None:
        """The parameters are whole."""

    def prefetch(self, layer: int | None) -> None:
        """They are whole."""

    def reshard(self, layer: int | None) -> None:
        """They stay whole."""

    def reduce(self, layer: int | None, gradients: Sequence[int]) -> list[int]:
        """The gradients themselves."""
        return list(gradients)

    def end_forward(self) -> None:
        """Nothing to free."""

    def end_backward(self) -> None:
        """Nothing to free."""
