"""What a recorded stream says of its passes: the layer of each event, and gradients that are added to others."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from brim.memory.events import EventStream
from brim.memory.sharding_units import Weight

_ADD_IN_PLACE = "aten::add_"


def layer_of_events(stream: EventStream) -> list[int | None]:
    """One value an event; None outside the layers.

    What happens outside any module between a layer and its neighbour in the same pass, or amid one layer, is that
    layer's: a unit is not left for it.
    """
    marked = [position for position, _ in stream.marks]
    layers = [place.layer for place in stream.places]
    sections = [(bisect_right(marked, at), place.phase) for at, place in enumerate(stream.places)]
    last: int | None = None  # the last event within a layer
    for position, layer in enumerate(layers[:]):
        if layer is None:
            continue
        if last is not None and last + 1 < position and sections[last] == sections[position]:
            before = layers[last]
            assert before is not None
            step = -1 if sections[position][1] == "backward" else 1
            if layer in (before, before + step):
                layers[last + 1 : position] = [before] * (position - last - 1)
        last = position
    return layers


def gradients_added(stream: EventStream, layers: list[int | None], weights: Sequence[Weight]) -> frozenset[int]:
    """Gradients of a later micro-batch, which a recording shows as storages that die when they are added in place.

    Sharded, they live as long as the first ones: until their unit has been reduced. layers: of each event.
    """
    sizes: dict[int | None, Counter[int]] = {}
    for weight in weights:
        if weight.trainable:
            sizes.setdefault(weight.layer, Counter())[weight.elements * weight.element_bytes] += 1
    marked = {position for position, _ in stream.marks}
    missing: dict[int | None, Counter[int]] = {}  # in this pass, by unit
    units: dict[int, int | None] = {}  # of storages born in a backward pass
    added: set[int] = set()
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        if position in marked:
            missing = {}
        if place.phase != "backward":
            continue
        if storage >= 0:
            units[storage] = layers[position]
        elif place.operator == _ADD_IN_PLACE and ~storage in units and stream.categories[~storage] != "gradients":
            unit, num_bytes = units[~storage], stream.sizes[~storage]
            if unit not in missing:
                missing[unit] = Counter(sizes.get(unit))
            left = missing[unit]
            if left[num_bytes]:
                left[num_bytes] -= 1
                added.add(~storage)
    return frozenset(added)
