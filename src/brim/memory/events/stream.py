"""Record what a step does to memory: storages that are born and die, in order, with where and why.

Each storage has a category, which follows from where it was born and how long it lives.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

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
