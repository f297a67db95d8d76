"""Count what a micro-batch computes and moves: FLOPs, bytes and kernels.

They are counted operator by operator, from the shapes that each is given, and multiplied over layers of one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

WorkPhase: TypeAlias = Literal["forward", "recompute", "backward", "optimizer"]


Unit: TypeAlias = Literal[
    "matrix", "attention", "vector"
]  # what does the arithmetic; FLOPs of vector units are not counted


class WorkPlace(NamedTuple):
    """Name kernels that are alike: those of one operator in one module."""

    phase: str  # a WorkPhase, or that of a run without gradients
    layer: int | None  # recorded; it stands for all layers that are like it
    module: str
    operator: str
    unit: Unit
    dtype: str  # of the arithmetic, such as "bfloat16"


@dataclass(frozen=True, slots=True)
class Work:
    """Hold the work of one place, over all layers that it stands for.

    flops: a multiplication and an addition count as two. num_bytes: bytes read and written, each tensor once for each
    kernel that uses it, as if nothing stayed in a cache.
    """

    flops: int
    num_bytes: int
    kernels: int

    def times(self, number: int) -> Work:
        return Work(self.flops * number, self.num_bytes * number, self.kernels * number)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """Count all kernels of a micro-batch, or of an update."""

    places: Mapping[WorkPlace, Work]

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.places.values())

    @property
    def num_bytes(self) -> int:
        return sum(work.num_bytes for work in self.places.values())

    @property
    def kernels(self) -> int:
        return sum(work.kernels for work in self.places.values())

    def of(self, *phases: WorkPhase) -> WorkCount:
        """Return the kernels of some phases."""
        return WorkCount(places={place: work for place, work in self.places.items() if place.phase in phases})


class WorkCounter:
    """Add up kernels while layers are recorded, by the part of the recording in which they run."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[WorkPlace, list[int]]] = {}

    def add(self, part: str, place: WorkPlace, *, flops: int, num_bytes: int, kernels: int) -> None:
        sums = self._parts.setdefault(part, {}).setdefault(place, [0, 0, 0])
        sums[0] += flops
        sums[1] += num_bytes
        sums[2] += kernels

    def over_all_layers(self, depth: Depth) -> dict[str, WorkCount]:
        """Return, by part, the work of all the model's layers, from that of the layers that were recorded."""
        num_like: Counter[int | None] = Counter({None: 1})
        num_like.update(depth.template(layer) for layer in range(depth.num_layers))
        return {
            part: WorkCount(places={place: Work(*sums).times(num_like[place.layer]) for place, sums in places.items()})
            for part, places in self._parts.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Say which layers stand for which: `head` first ones, blocks of `period` layers, `tail` last ones."""

    num_layers: int  # of the model
    head: int
    period: int
    tail: int

    @property
    def num_recorded(self) -> int:
        """Return how many layers to record: head, two blocks and tail; all where that saves nothing."""
        return min(self.num_layers, self.head + 2 * self.period + self.tail)

    @property
    def recorded(self) -> list[int]:
        """Return the model's layers that are recorded, in order."""
        if self.num_recorded == self.num_layers:
            return list(range(self.num_layers))
        front = self.head + 2 * self.period
        return [*range(front), *range(self.num_layers - self.tail, self.num_layers)]

    def whole(self) -> Depth:
        """Return the depth of the same model with all layers recorded."""
        return Depth(num_layers=self.num_layers, head=self.num_layers, period=1, tail=0)

    def is_middle(self, layer: int) -> bool:
        """Return whether a layer of the model is like one in each of the two recorded blocks."""
        return self.num_recorded < self.num_layers and self.head <= layer < self.num_layers - self.tail

    def template(self, layer: int) -> int:
        """Return the recorded layer that stands for a layer of the model."""
        if self.num_recorded == self.num_layers or layer < self.head:
            return layer
        if layer >= self.num_layers - self.tail:
            return self.num_recorded - (self.num_layers - layer)
        return self.head + self.period + (layer - self.head) % self.period


def depth_of(kinds: Sequence[Any]) -> Depth:
    """Find how the layers repeat. kinds: one value for each layer; layers of equal value are alike.

    The first layer follows the embeddings and the last precedes the head, so neither is ever a middle one. Nor is the
    first layer of a kind, since there the backward pass frees what all layers of that kind share.
    """
    num_layers = len(kinds)
    first_ones = max((kinds.index(kind) for kind in kinds), default=0) + 1
    for period in range(1, num_layers + 1):
        breaks = [i for i in range(num_layers - period) if kinds[i] != kinds[i + period]]
        head = max(first_ones, breaks[-1] + 1 if breaks else 0)
        tail = (num_layers - head - 1) % period + 1
        if head + 2 * period + tail < num_layers:
            return Depth(num_layers=num_layers, head=head, period=period, tail=tail)
    return Depth(num_layers=num_layers, head=num_layers, period=1, tail=0)
