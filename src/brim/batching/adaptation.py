"""The effective batch that follows the measured noise scale, one rung of a ladder at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from brim.batching.noise_scale import NoiseScale

_VOTES_TO_MOVE = 3

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """A batch size between bounds, and how many measurements in a row have asked for another.

    Up where the noise scale is at least the next rung, down where it is at most the rung below: after a move the noise
    scale has to change by a factor of two before the batch goes back.
    """

    size: int  # rows; between the bounds, at the start not necessarily a rung
    smallest: int  # rows, at least 1
    largest: int  # rows, at least `smallest`
    direction: Direction | None = None  # that the last measurements asked for
    num_votes: int = 0  # how many of them in a row

    def __post_init__(self) -> None:
        assert 1 <= self.smallest <= self.size <= self.largest, "a batch outside its bounds"

    @property
    def ladder(self) -> tuple[int, ...]:
        """The smallest batch, doubled again and again, and the largest exactly."""
        rungs = [self.smallest]
        while 2 * rungs[-1] < self.largest:
            rungs.append(2 * rungs[-1])
        return tuple(rungs) if rungs[-1] == self.largest else (*rungs, self.largest)

    def after(self, noise: NoiseScale) -> Adaptation:
        """One more measurement has been averaged into the noise scale."""
        direction, size = self._wish(noise)
        num_votes = 0 if direction is None else 1 + (self.num_votes if direction == self.direction else 0)
        if num_votes == _VOTES_TO_MOVE:
            return replace(self, size=size, direction=None, num_votes=0)
        return replace(self, direction=direction, num_votes=num_votes)

    def _wish(self, noise: NoiseScale) -> tuple[Direction | None, int]:
        """Where to, and the rung there."""
        above = next((rung for rung in self.ladder if rung > self.size), None)
        if above is not None and noise.is_at_least(above):
            return "up", above
        below = next((rung for rung in reversed(self.ladder) if rung < self.size), None)
        if below is not None and noise.is_at_most(below):
            return "down", below
        return None, self.size

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Adaptation:
        return cls(**saved)
