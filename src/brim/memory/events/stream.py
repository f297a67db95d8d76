"""Record what a step does to memory, and count what it computes.

Storages are born and die, in order, with where and why; each has a category, which follows from where it was born and
how long it lives. FLOPs, bytes and kernels are counted operator by operator, from the shapes that each is given, and
multiplied over layers of one kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

_GENERATING = ("prefill", "decode")


def categorize(stream: EventStream, *, body: str, recomputed: Set[int]) -> None:
    """Give each storage that is still `temporary` its category.

    body: the path of the module that holds the decoder layers; what is born outside it once the layers have begun
    belongs to logits and loss. recomputed: storages that outlive their recomputation.
    """
    kept = _kept_for_backward(stream) | recomputed
    cached = _outliving_their_pass(stream)
    for storage, place in _births_after_layers(stream):
        if stream.categories[storage] == "temporary":
            stream.categories[storage] = _category(storage, place, body, kept, cached)


def _category(storage: int, place: Place, body: str, kept: Set[int], cached: Set[int]) -> Category:
    if _reorders_cache(place):
        return "kv_cache"
    if place.layer is None and not f"{place.module}.".startswith(f"{body}."):
        return "logits_and_loss"
    if place.phase in _GENERATING and place.layer is not None and storage in cached:
        return "kv_cache"
    if place.phase in ("forward", "backward"):
        return "activations" if storage in kept else "temporary"
    return "activations"


def _reorders_cache(place: Place) -> bool:
    """Return whether a beam search copies the chosen beams' keys and values: after a token and outside the model."""
    return place.phase in _GENERATING and (place.module, place.operator) == ("", "aten::index_select")


def _births_after_layers(stream: EventStream) -> list[tuple[int, Place]]:
    """Return the births from the first one in a layer on, in each part."""
    marks = {position for position, _ in stream.marks}
    births: list[tuple[int, Place]] = []
    begun = False
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        if position in marks:
            begun = False
        begun = begun or (place.layer is not None and place.phase != "load")
        if storage >= 0 and place.phase != "load" and (begun or place.module or _reorders_cache(place)):
            births.append((storage, place))
    return births


def _kept_for_backward(stream: EventStream) -> set[int]:
    """Return the storages of a forward pass that are alive when its backward pass begins."""
    alive: set[int] = set()
    kept: set[int] = set()
    was_backward = False
    for storage, place in zip(stream.storages, stream.places, strict=True):
        is_backward = place.phase == "backward"
        if is_backward and not was_backward:
            kept |= alive
        was_backward = is_backward
        if storage < 0:
            alive.discard(~storage)
        elif place.phase == "forward":
            alive.add(storage)
    return kept


def _outliving_their_pass(stream: EventStream) -> set[int]:
    """Return the storages born in a layer that are alive when the pass over all layers is over."""
    alive: set[int] = set()
    outliving: set[int] = set()
    for storage, place in zip(stream.storages, stream.places, strict=True):
        if place.layer is None and not place.module:  # back outside the model
            outliving |= alive
            alive.clear()
        if storage < 0:
            alive.discard(~storage)
        elif place.layer is not None:
            alive.add(storage)
    return outliving


Phase: TypeAlias = Literal["load", "train", "evaluate", "generate"]


Category: TypeAlias = Literal[
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "logits_and_loss",
    "kv_cache",
    "workspace",
    "temporary",
]


CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class Place:
    """Say where in a step something happens."""

    phase: str  # load, forward, backward, optimizer, evaluate, prefill or decode
    layer: int | None = None  # decoder layer, from 0; None: outside the layers
    module: str = ""  # dotted path in the model; "" outside it
    operator: str = ""  # such as aten.mm

    @property
    def where(self) -> str:
        """Return the operator and the module, without PEFT's wrapping in the module's path: "mm in lm_head"."""
        operator = self.operator.removeprefix("aten::").removeprefix("aten.")
        module = self.module.removeprefix("base_model.model.")
        return f"{operator} in {module}" if operator and module else operator or module


@dataclass(slots=True)
class EventStream:
    """Hold births and deaths of storages in the order in which they happen.

    Storage k (from 0) has `sizes[k]` bytes and `categories[k]`. Event e is `storages[e]`: k for the birth of storage
    k, ~k (that is, -k - 1) for its death; it happens at `places[e]`. `marks` name positions as (event, label):
    something begins before the event, such as "step 1" or "backward".
    """

    sizes: list[int] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def birth(self, num_bytes: int, category: Category, place: Place) -> int:
        """Append the birth of a new storage, and return its number."""
        storage = len(self.sizes)
        self.sizes.append(num_bytes)
        self.categories.append(category)
        self.storages.append(storage)
        self.places.append(place)
        return storage

    def death(self, storage: int, place: Place) -> None:
        """Append the death of a storage that is alive."""
        self.storages.append(~storage)
        self.places.append(place)

    def mark(self, label: str) -> None:
        """Name the position before the next event."""
        self.marks.append((len(self.storages), label))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Describe a parameter as it is stored; a quantised one by its packed storage."""

    storage: int  # its number in the stream
    shape: tuple[int, ...]
    element_bytes: int
    layer: int | None  # the decoder layer that it belongs to; None: outside the layers
    trainable: bool

    @property
    def elements(self) -> int:
        """Return the number of elements of the whole parameter."""
        return math.prod(self.shape)


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
            part: WorkCount(
                places={place: Work(*(num_like[place.layer] * each for each in sums)) for place, sums in places.items()}
            )
            for part, places in self._parts.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Say which layers stand for which: `head` first ones, blocks of `period` layers, `tail` last ones.

    Where the first layers repeat by themselves, as those do that alone are recomputed, `within` says how fewer layers
    yet stand for those that stand for the model's.
    """

    num_layers: int  # of the model
    head: int
    period: int
    tail: int
    within: Depth | None = None  # of the layers that this one repeats; None: they are recorded

    @property
    def num_recorded(self) -> int:
        """Return how many layers to record: head, two blocks and tail; all where that saves nothing."""
        return self._num_templates if self.within is None else self.within.num_recorded

    @property
    def _num_templates(self) -> int:
        return min(self.num_layers, self.head + 2 * self.period + self.tail)

    @property
    def recorded(self) -> list[int]:
        """Return the model's layers that are recorded, in order."""
        front = self.head + 2 * self.period
        templates = [*range(front), *range(self.num_layers - self.tail, self.num_layers)]
        if self._num_templates == self.num_layers:
            templates = list(range(self.num_layers))
        return templates if self.within is None else [templates[each] for each in self.within.recorded]

    def whole(self) -> Depth:
        """Return the depth of the same model with all layers recorded."""
        return Depth(num_layers=self.num_layers, head=self.num_layers, period=1, tail=0)

    def is_middle(self, layer: int) -> bool:
        """Return whether a layer of the model is like one in each of the two recorded blocks."""
        return self._num_templates < self.num_layers and self.head <= layer < self.num_layers - self.tail

    def template(self, layer: int) -> int:
        """Return the recorded layer that stands for a layer of the model."""
        found = layer
        if self.is_middle(layer):
            found = self.head + self.period + (layer - self.head) % self.period
        elif layer >= self.head:
            found = self._num_templates - (self.num_layers - layer)
        return found if self.within is None else self.within.template(found)


def depth_of(kinds: Sequence[Any], *, front: int = 0) -> Depth:
    """Find how the layers repeat. kinds: one value for each layer; layers of equal value are alike.

    front: so many first layers, of other kinds than all that follow, may repeat by themselves.
    """
    depth, first = _depth_of(kinds), _depth_of(kinds[:front])
    if front > depth.head or first.num_recorded == front:
        return depth
    num_templates = depth.num_recorded
    return replace(depth, within=replace(first, num_layers=num_templates, tail=num_templates - front + first.tail))


def _depth_of(kinds: Sequence[Any]) -> Depth:
    """Find how all the layers repeat.

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
