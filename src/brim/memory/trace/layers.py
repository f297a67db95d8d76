"""Give a stream recorded from a few decoder layers the model's real depth, exactly.

The middle layers of a model do the same to memory, one after the other. So it is enough to record the first ones, two
blocks of middle ones (which must agree, or nothing is expanded) and the last ones, and to repeat a middle block.

Which layers are alike follows from an architecture's modules, and from what its configuration says of each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.events import Depth, EventStream, Place, depth_of
from brim.memory.trace.segments import NotUniformError, Pass, Segment, passes_over_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_NUM_LAYERS = "num_hidden_layers"


_FIRST_DENSE = "first_k_dense_replace"  # how many of the first layers have no experts


_RECOMPUTED = "recomputed_layers"  # our own: of each layer, whether checkpointing recomputes it


_PLAIN = (bool, int, str, torch.dtype, type(None))


def depth_of_architecture(architecture: PretrainedConfig) -> Depth:
    """Find how the decoder layers repeat; all are recorded where the configuration cannot describe fewer of them.

    Raises what transformers does when the architecture cannot be built, LookupError where no layers are found.
    """
    key = type(architecture), architecture.to_json_string(use_diff=False)
    if key not in _DEPTHS:
        _DEPTHS.clear()  # one architecture is enough: every shape of it that is recorded asks for its depth
        _DEPTHS[key] = _depth(architecture)
    return _DEPTHS[key]


_DEPTHS: dict[tuple[type, str], Depth] = {}


def _depth(architecture: PretrainedConfig) -> Depth:
    num_layers = getattr(architecture.get_text_config(), _NUM_LAYERS)
    kinds = _kinds(architecture)
    depth = depth_of(kinds, front=num_recomputed(architecture))
    if depth.num_recorded == num_layers or _kinds(with_layers(architecture, depth.recorded)) == [
        kinds[layer] for layer in depth.recorded
    ]:
        return depth
    return depth.whole()


def with_layers(architecture: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Return the architecture with only these of its layers, as far as its configuration can say so."""
    num_layers = getattr(architecture.get_text_config(), _NUM_LAYERS)
    fewer = copy.deepcopy(architecture)
    text = fewer.get_text_config()
    for name, values in _values_by_layer(text, num_layers):
        setattr(text, name, [values[layer] for layer in layers])
    num_dense = getattr(text, _FIRST_DENSE, None)
    if num_dense is not None:
        setattr(text, _FIRST_DENSE, sum(layer < num_dense for layer in layers))
    setattr(text, _NUM_LAYERS, len(layers))
    return fewer


def recomputing(architecture: PretrainedConfig, num_recomputed: int) -> PretrainedConfig:
    """Return the architecture with so many first layers of another kind: those that the backward pass recomputes."""
    marked = copy.deepcopy(architecture)
    text = marked.get_text_config()
    setattr(text, _RECOMPUTED, [layer < num_recomputed for layer in range(getattr(text, _NUM_LAYERS))])
    return marked


def num_recomputed(architecture: PretrainedConfig) -> int:
    """Return how many of the layers are recomputed, of an architecture that says so, with fewer layers or all."""
    return sum(getattr(architecture.get_text_config(), _RECOMPUTED, ()))


def decoder_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of decoder layers. Raises LookupError where there is none."""
    decoder = model.get_decoder()  # type: ignore[operator]  # not a vision tower, which may be as deep
    inside = set(decoder.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and module in inside:
            return name, module
    raise LookupError(f"no list of {num_layers} decoder layers in {type(model).__name__}")


def _kinds(architecture: PretrainedConfig) -> list[tuple[Any, ...]]:
    """Return one value for each layer; layers of equal value do the same."""
    from transformers import AutoModelForCausalLM

    text = architecture.get_text_config()
    num_layers = getattr(text, _NUM_LAYERS)
    is_foreign = type(architecture).__module__.startswith("transformers_modules")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=is_foreign)
    _, layers = decoder_layers(model, num_layers)
    settings = [values for _, values in _values_by_layer(text, num_layers)]
    return list(zip(_without_numbers([_modules(layer) for layer in layers]), *settings, strict=True))


def _values_by_layer(architecture: PretrainedConfig, num_layers: int) -> list[tuple[str, list[Any]]]:
    """Return settings with one value per layer, such as `layer_types`, but not those that only number the layers."""
    return [
        (name, list(value))
        for name, value in vars(architecture).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers and not name.startswith("_")
        if list(value) != list(range(num_layers))
    ]


def _modules(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Return every module's class, plain attributes and shapes."""
    facts: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        facts[path, ""] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN) and not name.startswith("_"):
                facts[path, name] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            facts[path, name] = None if tensor is None else (tensor.shape, tensor.dtype)
    return facts


def _without_numbers(layers: list[dict[tuple[str, str], Any]]) -> list[dict[tuple[str, str], Any]]:
    """Drop the attributes that number the layers."""
    offsets: dict[tuple[str, str], set[int | None]] = {}
    for number, layer in enumerate(layers):
        for key, value in layer.items():
            counts = isinstance(value, int) and not isinstance(value, bool)
            offsets.setdefault(key, set()).add(value - number if counts else None)
    counting = {key for key, found in offsets.items() if len(found) == 1 and None not in found}
    return [{key: value for key, value in layer.items() if key not in counting} for layer in layers]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Hold a stream of full depth, and where the recorded storages are in it."""

    stream: EventStream
    numbers: Mapping[tuple[int, int | None], int] | None  # (recorded storage, layer) -> storage; None: as recorded
    within: tuple[Expansion, Depth] | None = None  # that was expanded further, and how; None: the recorded stream was

    def number(self, recorded: int, layer: int | None) -> int:
        """Return the storage in `layer` that is like the recorded one. Raises NotUniformError if there is none."""
        if self.within is not None:
            first, depth = self.within
            recorded = first.number(recorded, None if layer is None else depth.template(layer))
        if self.numbers is None:
            return recorded
        for owner in (layer, None):
            if (recorded, owner) in self.numbers:
                return self.numbers[recorded, owner]
        raise NotUniformError(f"storage {recorded} is not of layer {layer}")


def expand(stream: EventStream, depth: Depth, *, layers_path: str) -> Expansion:
    """Expand a stream to all layers. layers_path: the dotted path of the list of layers, which are renumbered.

    Raises NotUniformError where the recorded middle blocks differ.
    """
    if depth.within is not None:
        rest = replace(depth, within=None)
        first = expand(stream, depth.within, layers_path=layers_path)
        return replace(expand(first.stream, rest, layers_path=layers_path), within=(first, rest))
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

    The allocator ends up the same in whatever order they come, and for some the order is arbitrary: autocast keeps its
    copies of weights in a hash table.
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
    """Return, for each storage, the layer to whose segment its birth belongs."""
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
    """Describe what a segment does, with layers counted from its own."""
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
    """Write the expanded stream."""

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
            while marks and marks[-1][0] <= each.start:
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
        """Raise NotUniformError where storages of both middle blocks die outside the layers.

        In the whole model, storages of every middle layer would die there, not only of those near one end.
        """
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
        """Write a segment as that of `layer`. twin: for a middle layer, the segment like it in the block before."""
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
        """Find what dies in one of the first or last layers: it belongs to a layer near it, or to the other end.

        If it belonged to the middle block farther away, it could be of any middle layer.
        """
        assert segment.layer is not None
        owner = self._owner(storage)
        block = (owner - self._depth.head) // self._depth.period
        if block > 1 if layer < self._depth.head else block < 0:  # such as a gradient that all layers add to
            return self._like(storage, self._at_the_edge(owner))
        if block > 0 if layer < self._depth.head else block < 1:
            raise NotUniformError(f"in layer {segment.layer}, something dies of layer {owner}")
        return self._like(storage, layer + owner - segment.layer)

    def _dying_in_the_middle(self, storage: int, twins: int, segment: Segment, layer: int) -> int:
        """Find what dies in a middle layer; it may belong to a layer near it, up to a block away.

        Which birth of that layer it is, is taken from the recorded block that has a neighbour of the same sort: the
        first block lies between head and middle, the second between middle and tail.
        twins: the storage that dies in the twin where this one does in the segment.
        """
        assert segment.layer is not None
        distance = self._owner(storage) - segment.layer
        owner_layer = layer + distance
        if abs(distance) > self._depth.period:
            raise NotUniformError(f"in layer {segment.layer}, something dies of layer {self._owner(storage)}")
        is_twins = owner_layer < self._depth.head or (distance > 0 and self._depth.is_middle(owner_layer))
        return self._like(twins if is_twins else storage, owner_layer)

    def _owner(self, storage: int) -> int:
        owner = self._owners[storage]
        assert owner is not None
        return owner

    def _like(self, storage: int, layer: int) -> int:
        """Return the storage of full depth that is in `layer` what the recorded one is in its own."""
        number, index = self._local[storage]
        return self._numbers[self._births[number, self._depth.template(layer)][index], layer]

    def _at_the_edge(self, owner: int) -> int:
        """Return the layer of full depth at the same distance from its end as a recorded one."""
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
