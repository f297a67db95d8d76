"""Give a stream recorded from a few decoder layers the model's real depth, exactly.

The middle layers of a model do the same to memory, one after the other. So it is enough to record the first ones, two
blocks of middle ones (which must agree, or nothing is expanded) and the last ones, and to repeat a middle block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.memory.depth import Depth
from brim.memory.events import EventStream, Place
from brim.memory.layer_passes import NotUniformError, Pass, Segment, passes_over_layers


@dataclass(frozen=True, slots=True)
class Expansion:
    """A stream of full depth, and where the recorded storages are in it."""

    stream: EventStream
    numbers: Mapping[tuple[int, int | None], int] | None  # (recorded storage, layer) -> storage; None: as recorded

    def number(self, recorded: int, layer: int | None) -> int:
        """The storage in `layer` of the model that is like the recorded one. Raises NotUniformError if it has none."""
        if self.numbers is None:
            return recorded
        for owner in (layer, None):
            if (recorded, owner) in self.numbers:
                return self.numbers[recorded, owner]
        raise NotUniformError(f"storage {recorded} is not of layer {layer}")


def expand(stream: EventStream, depth: Depth, *, layers_path: str) -> Expansion:
    """The stream of all layers. layers_path: the dotted path of the list of layers, whose numbers are set anew.

    Raises NotUniformError where the recorded middle blocks differ.
    """
    _sort_deaths(stream)
    if depth.num_recorded == depth.num_layers:
        return Expansion(stream, None)
    passes = passes_over_layers(stream, depth.num_recorded)
    owners = _owners(stream, passes)
    for each in passes:
        if each.is_over_layers:
            _require_uniform(stream, each, owners, depth)
    return _Writer(stream, owners, depth, layers_path).write(passes)


def _sort_deaths(stream: EventStream) -> None:
    """Put deaths that follow each other into the order of births.

    The allocator is left the same in whatever order they come, and some come in none: autocast keeps its copies of
    weights in a hash table.
    """
    storages, places = stream.storages, stream.places
    marked = {position for position, _ in stream.marks}
    start = 0
    for position in range(len(storages) + 1):
        ends = position == len(storages) or storages[position] >= 0 or position in marked
        ends = ends or (position > start and places[position] != places[start])
        if not ends:
            continue
        if position - start > 1:
            storages[start:position] = sorted(storages[start:position], reverse=True)
        start = position if position < len(storages) and storages[position] < 0 else position + 1


def _owners(stream: EventStream, passes: list[Pass]) -> list[int | None]:
    """The layer to whose segment each storage's birth belongs."""
    owners: list[int | None] = [None] * len(stream.sizes)
    for segment in (segment for each in passes for segment in each.segments):
        for position in segment.events:
            if stream.storages[position] >= 0:
                owners[stream.storages[position]] = segment.layer
    return owners


def _require_uniform(stream: EventStream, over: Pass, owners: list[int | None], depth: Depth) -> None:
    by_layer = {segment.layer: segment for segment in over.segments}
    for offset in range(depth.period):
        first, second = (by_layer[depth.head + offset + block * depth.period] for block in (0, 1))
        if _shape(stream, first, owners) != _shape(stream, second, owners):
            raise NotUniformError(f"layers {first.layer} and {second.layer} differ")


def _shape(stream: EventStream, segment: Segment, owners: list[int | None]) -> list[tuple[Any, ...]]:
    """What a segment does, with layers counted from its own."""
    assert segment.layer is not None
    shape: list[tuple[Any, ...]] = []
    for position in segment.events:
        storage, place = stream.storages[position], stream.places[position]
        if storage >= 0:
            shape.append((stream.sizes[storage], stream.categories[storage], place.operator))
            continue
        owner = owners[~storage]
        shape.append((None if owner is None else owner - segment.layer, stream.sizes[~storage]))
    return shape


class _Writer:
    """Writes the expanded stream."""

    def __init__(self, stream: EventStream, owners: list[int | None], depth: Depth, layers_path: str) -> None:
        self._stream, self._owners, self._depth = stream, owners, depth
        self._path = f"{layers_path}."
        self._out = EventStream()
        self._numbers: dict[tuple[int, int | None], int] = {}
        self._local: dict[int, tuple[int, int]] = {}  # storage -> its pass and place among the births of its segment
        self._births: dict[tuple[int, int | None], list[int]] = {}  # (pass, recorded layer) -> storages
        self._places: dict[tuple[Place, int | None], Place] = {}

    def write(self, passes: list[Pass]) -> Expansion:
        marks = list(reversed(self._stream.marks))
        for number, each in enumerate(passes):
            for segment in each.segments:
                self._index(number, segment)
            while marks and marks[-1][0] <= each.segments[0].events[0]:
                self._out.mark(marks.pop()[1])
            if not each.is_over_layers:
                self._require_one_block(each.segments[0])
                self._repeat(each.segments[0], None)
                continue
            by_layer = {segment.layer: segment for segment in each.segments}
            up = each.segments[0].layer == 0
            layers = range(self._depth.num_layers)
            for layer in layers if up else reversed(layers):
                template = self._depth.template(layer)
                twin = by_layer[template - self._depth.period] if self._depth.is_middle(layer) else None
                self._repeat(by_layer[template], layer, twin)
        while marks:
            self._out.mark(marks.pop()[1])
        return Expansion(self._out, self._numbers)

    def _require_one_block(self, segment: Segment) -> None:
        """What dies outside the layers must be of their ends: of both blocks of middle ones, it is of all of them."""
        depth = self._depth
        dying = (~self._stream.storages[p] for p in segment.events if self._stream.storages[p] < 0)
        owners = {owner for storage in dying if (owner := self._owners[storage]) is not None}
        blocks = {(owner - depth.head) // depth.period for owner in owners}
        if {0, 1} <= blocks:
            raise NotUniformError(f"outside the layers, something dies of layers {sorted(owners)}")

    def _index(self, number: int, segment: Segment) -> None:
        births = [self._stream.storages[p] for p in segment.events if self._stream.storages[p] >= 0]
        self._births[number, segment.layer] = births
        for index, storage in enumerate(births):
            self._local[storage] = (number, index)

    def _repeat(self, segment: Segment, layer: int | None, twin: Segment | None = None) -> None:
        """One segment as that of `layer`. twin: of a middle layer, the same one in the block before."""
        stream, out = self._stream, self._out
        for index, position in enumerate(segment.events):
            storage, place = stream.storages[position], self._place(stream.places[position], layer)
            if storage >= 0:
                owner = layer if self._owners[storage] is not None else None
                number = out.birth(stream.sizes[storage], stream.categories[storage], place)
                self._numbers[storage, owner] = number
            elif layer is None or self._owners[~storage] is None:
                out.death(self._dying_outside(~storage), place)
            elif twin is None:
                out.death(self._dying_at_an_end(~storage, segment, layer), place)
            else:
                out.death(
                    self._dying_in_the_middle(~storage, ~stream.storages[twin.events[index]], segment, layer), place
                )

    def _dying_outside(self, storage: int) -> int:
        owner = self._owners[storage]
        return self._numbers[storage, None] if owner is None else self._like(storage, self._at_the_edge(owner))

    def _dying_at_an_end(self, storage: int, segment: Segment, layer: int) -> int:
        """What dies in one of the first or last layers is of one next to it; of the other block, it might be of any."""
        assert segment.layer is not None
        owner = self._owner(storage)
        block = (owner - self._depth.head) // self._depth.period
        if block > 0 if layer < self._depth.head else block < 1:
            raise NotUniformError(f"in layer {segment.layer}, something dies of layer {owner}")
        return self._like(storage, layer + owner - segment.layer)

    def _dying_in_the_middle(self, storage: int, twins: int, segment: Segment, layer: int) -> int:
        """What dies may be of another layer: which one of its births it is shows in the block that lies between blocks.

        twins: the storage that dies in the twin where this one does in the segment.
        """
        assert segment.layer is not None
        distance = self._owner(storage) - segment.layer
        wanted = layer + distance
        if abs(distance) > self._depth.period:
            raise NotUniformError(f"in layer {segment.layer}, something dies of layer {self._owner(storage)}")
        is_twins = wanted < self._depth.head or (distance > 0 and self._depth.is_middle(wanted))
        return self._like(twins if is_twins else storage, wanted)

    def _owner(self, storage: int) -> int:
        owner = self._owners[storage]
        assert owner is not None
        return owner

    def _like(self, storage: int, layer: int) -> int:
        """The storage of full depth that is in `layer` what the recorded one is in its own."""
        number, index = self._local[storage]
        return self._numbers[self._births[number, self._depth.template(layer)][index], layer]

    def _at_the_edge(self, owner: int) -> int:
        """Outside the layers, what recorded layers left is that of the layers at the same distance from an end."""
        depth = self._depth
        if owner < depth.head + depth.period:
            return owner
        return depth.num_layers - (depth.num_recorded - owner)

    def _place(self, place: Place, layer: int | None) -> Place:
        if place.layer is None or layer is None or place.layer == layer:
            return place
        known = self._places.get((place, layer))
        if known is None:
            module = place.module.replace(f"{self._path}{place.layer}", f"{self._path}{layer}", 1)
            known = self._places[place, layer] = Place(place.phase, layer, module, place.operator)
        return known
