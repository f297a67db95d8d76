"""What a micro-batch computes and moves: FLOPs, bytes and kernels, operator by operator, over all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from brim.memory.depth import Depth

WorkPhase: TypeAlias = Literal["forward", "recompute", "backward", "optimizer"]
Unit: TypeAlias = Literal[
    "matrix", "attention", "vector"
]  # what does the arithmetic; of vectors, FLOPs are not counted


class WorkPlace(NamedTuple):
    """Kernels that are alike: of one operator in one module."""

    phase: str  # a WorkPhase, or that of a run without gradients
    layer: int | None  # recorded; it stands for all layers that are like it
    module: str
    operator: str
    unit: Unit
    dtype: str  # of the arithmetic, such as "bfloat16"


@dataclass(frozen=True, slots=True)
class Work:
    """Of one place, over all layers that it stands for.

    flops: a multiplication and an addition are two. num_bytes: read and written, each tensor once for each kernel that
    uses it, as if nothing stayed in a cache.
    """

    flops: int
    num_bytes: int
    kernels: int

    def times(self, number: int) -> Work:
        return Work(self.flops * number, self.num_bytes * number, self.kernels * number)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """All kernels of a micro-batch, or of an update."""

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
        """Those of some phases."""
        return WorkCount(places={place: work for place, work in self.places.items() if place.phase in phases})

    def flops_by_dtype(self) -> dict[str, int]:
        flops: Counter[str] = Counter()
        for place, work in self.places.items():
            if work.flops:
                flops[place.dtype] += work.flops
        return dict(flops)


class WorkCounter:
    """Adds up kernels while layers are recorded, by the part of the recording in which they run."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[WorkPlace, list[int]]] = {}

    def add(self, part: str, place: WorkPlace, *, flops: int, num_bytes: int, kernels: int) -> None:
        sums = self._parts.setdefault(part, {}).setdefault(place, [0, 0, 0])
        sums[0] += flops
        sums[1] += num_bytes
        sums[2] += kernels

    def over_all_layers(self, depth: Depth) -> dict[str, WorkCount]:
        """By part, the work of the model's layers, given that of those that were recorded."""
        num_like: Counter[int | None] = Counter({None: 1})
        num_like.update(depth.template(layer) for layer in range(depth.num_layers))
        return {
            part: WorkCount(places={place: Work(*sums).times(num_like[place.layer]) for place, sums in places.items()})
            for part, places in self._parts.items()
        }
