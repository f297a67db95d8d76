"""A stream whose weights come as loading brings them, instead of one after the other in the model's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from brim.memory.events import EventStream
from brim.memory.quantized.loading import LoadedTensor, LoadKind, load_events

# A module's path in the base model, and bytes: a module's tensors of the same size are interchangeable here.
_Key: TypeAlias = tuple[str, int]


def with_loading(
    stream: EventStream,
    tensors: Sequence[LoadedTensor],
    kind: LoadKind,
    *,
    device_bytes: int | None = None,
    has_warmup: bool = True,
) -> EventStream:
    """The stream with the load of the base model's tensors in transformers' order, and what is there on the way.

    stream: its part "load" gives birth to all weights, each at the place of its module. tensors: of the base model, of
    all layers. What the stream's load has beside them, such as an adapter, comes after them. Raises LookupError where
    a tensor is not in the stream's load. has_warmup: transformers' since 4.50 (see load_events).
    """
    (start, _), (end, _) = _load_part(stream)
    born: dict[_Key, list[int]] = defaultdict(list)
    place_of = {}
    for position in range(start, end):
        storage, place = stream.storages[position], stream.places[position]
        born[base_path(place.module), stream.sizes[storage]].append(storage)
        place_of[storage] = place
    loading = EventStream()
    resident = load_events(loading, tensors, kind, device_bytes=device_bytes, has_warmup=has_warmup)
    names = {storage: name for name, storage in resident.items()}
    out = EventStream(
        sizes=list(stream.sizes),
        categories=list(stream.categories),
        storages=stream.storages[:start],
        places=stream.places[:start],
    )
    given: dict[int, int] = {}
    for storage, place in zip(loading.storages, loading.places, strict=True):
        if storage < 0:
            out.death(given[~storage], place)
        elif storage in names:
            mine = _take(born, (names[storage].rpartition(".")[0], loading.sizes[storage]), names[storage])
            out.storages.append(mine)
            out.places.append(place_of.pop(mine))
        else:
            given[storage] = out.birth(loading.sizes[storage], loading.categories[storage], place)
    for storage, place in place_of.items():
        out.storages.append(storage)
        out.places.append(place)
    shift = len(out.storages) - end
    out.storages += stream.storages[end:]
    out.places += stream.places[end:]
    out.marks = [(position if position <= start else position + shift, label) for position, label in stream.marks]
    return out


def of_all_layers(
    tensors: Sequence[LoadedTensor], *, layers_path: str, num_layers: int, template: Callable[[int], int]
) -> list[LoadedTensor]:
    """The tensors of a model of `num_layers` layers, of which the given ones hold some.

    template: which of those a layer is like.
    """
    prefix = f"{base_path(layers_path)}."

    def layer_of(tensor: LoadedTensor) -> int | None:
        number = tensor.name.removeprefix(prefix).partition(".")[0]
        return int(number) if tensor.name.startswith(prefix) and number.isdigit() else None

    by_layer: dict[int, list[LoadedTensor]] = defaultdict(list)
    for tensor in tensors:
        if (layer := layer_of(tensor)) is not None:
            by_layer[layer].append(tensor)

    def copies() -> Iterator[LoadedTensor]:
        for layer in range(num_layers):
            old = template(layer)
            for tensor in by_layer[old]:
                rest = tensor.name.removeprefix(f"{prefix}{old}.")
                yield replace(tensor, name=f"{prefix}{layer}.{rest}", layer=layer)

    out: list[LoadedTensor] = []
    for tensor in tensors:
        if layer_of(tensor) is None:
            out.append(tensor)
        elif tensor is by_layer[0][0]:
            out.extend(copies())
    return out


def base_path(module: str) -> str:
    """A module's path in the base model, from that in the model as PEFT wraps it."""
    parts = f"{module}.".removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("", "base_layer"))


def _load_part(stream: EventStream) -> tuple[tuple[int, str], tuple[int, str]]:
    index = next(index for index, (_, label) in enumerate(stream.marks) if label == "load")
    following = stream.marks[index + 1] if index + 1 < len(stream.marks) else (len(stream.storages), "end")
    return stream.marks[index], following


def _take(born: dict[_Key, list[int]], key: _Key, name: str) -> int:
    if not born.get(key):
        raise LookupError(f"{name}, {key[1]:,} bytes, is not among what the stream loads")
    return born[key].pop(0)
