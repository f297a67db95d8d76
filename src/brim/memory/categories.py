"""What the storages of a recorded step are for, by where they were born and how long they live."""

from __future__ import annotations

from collections.abc import Set

from brim.memory.events import Category, EventStream, Place

_GENERATING = ("prefill", "decode")


def categorize(stream: EventStream, *, body: str, recomputed: Set[int]) -> None:
    """Give each storage that has none yet, that is, `temporary`, its category.

    body: the path of the module that holds the decoder layers; what is born outside it once the layers have begun has
    to do with logits and loss. recomputed: storages that outlive their recomputation.
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
    """Whether a beam search takes the chosen beams' keys and values, after a token and outside the model."""
    return place.phase in _GENERATING and (place.module, place.operator) == ("", "aten::index_select")


def _births_after_layers(stream: EventStream) -> list[tuple[int, Place]]:
    """Births from the first one in a layer on, in each part."""
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
    """Storages of a forward pass that are alive when its backward pass begins."""
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
    """Storages born in a layer that are alive when the pass over all layers is over."""
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
