"""Where FSDP1 gathers the layer before, when adapters are units of their own.

BACKWARD_PRE gathers the unit whose forward pass ended last before that of the unit whose gradients are due
(`_get_handle_to_prefetch`). Before a layer that is its own last adapter; before its first adapter, the layer before. So
a layer is gathered with the gradients of the first adapter after it, when that layer's backward pass is nearly over.
"""

from __future__ import annotations

from collections.abc import Sequence

from brim.memory.events import EventStream
from brim.memory.sharding_units import Weight


def late_prefetches(stream: EventStream, layers: list[int | None], weights: Sequence[Weight]) -> dict[int, int]:
    """Layers with adapters, by the event before which their forerunner is gathered. layers: of each event."""
    modules = _first_adapters(stream, weights)
    found: dict[int, int] = {}
    layer: int | None = None
    begins: int | None = None  # of the last births in the first adapter, in this layer's part of the backward pass
    is_over = False
    for position in reversed(range(len(stream.storages))):
        here = layers[position] if stream.places[position].phase == "backward" else None
        if here != layer:
            layer, begins, is_over = here, None, False
        if layer is None or layer not in modules or stream.storages[position] < 0 or is_over:
            continue
        if stream.places[position].module == modules[layer]:
            found.pop(-1 if begins is None else begins, None)
            begins = position
            found[position] = layer
        else:
            is_over = begins is not None
    return found


def _first_adapters(stream: EventStream, weights: Sequence[Weight]) -> dict[int | None, str]:
    """The module of the first parameter that is trained, in each layer that has frozen ones, too."""
    frozen = {weight.layer for weight in weights if not weight.trainable}
    firsts: dict[int | None, int] = {}
    for weight in weights:
        if weight.trainable and weight.layer is not None and weight.layer in frozen:
            firsts[weight.layer] = min(weight.storage, firsts.get(weight.layer, weight.storage))
    wanted = {storage: layer for layer, storage in firsts.items()}
    return {
        wanted[storage]: place.module
        for storage, place in zip(stream.storages, stream.places, strict=True)
        if storage in wanted
    }
