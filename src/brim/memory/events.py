"""What a step does to memory: storages that are born and die, in order, with where and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

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
    """Where in a step something happens."""

    phase: str  # load, forward, backward, optimizer, evaluate, prefill or decode
    layer: int | None = None  # decoder layer, from 0; None: outside the layers
    module: str = ""  # dotted path in the model; "" outside it
    operator: str = ""  # such as aten.mm


@dataclass(slots=True)
class EventStream:
    """Births and deaths of storages in the order in which they happen.

    Storage k (from 0) has `sizes[k]` bytes and `categories[k]`. Event e is `storages[e]`: k for the birth of storage
    k, ~k (that is, -k - 1) for its death; it happens at `places[e]`. `marks` name positions: (event, label) before
    which something begins, such as "step 1" or "backward".
    """

    sizes: list[int] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def birth(self, num_bytes: int, category: Category, place: Place) -> int:
        """Append the birth of a new storage; its number."""
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
