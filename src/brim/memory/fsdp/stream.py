"""Turn the stream of a step on one GPU into that of one rank among several that share weights and state.

The ranks share weights, gradients and optimizer state. This is a pure transformation: the recorded stream says when
each layer computes; the parameters say what is sharded. What belongs to activations stays as it was recorded, since
each rank computes its own rows.

Where adapters are units of their own, FSDP1's BACKWARD_PRE gathers the unit whose forward pass ended last before that
of the unit whose gradients are due (`_get_handle_to_prefetch`). Ahead of a layer, that is the layer's own last
adapter; ahead of its first adapter, it is the layer before. So a layer is gathered with the gradients of the first
adapter after it, when that layer's backward pass is nearly over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from brim.memory.events import EventStream, Place, Weight
from brim.memory.fsdp.units import (
    COMPUTE,
    FlatShards,
    FullyShard,
    Precision,
    Sharded,
    Tape,
    gradients_added,
    layer_of_events,
    shard_elements,
    sharded_sizes,
    storages_kept_by_hooks,
    units,
)

if TYPE_CHECKING:
    from brim.memory.devices import Device

Kind: TypeAlias = Literal["fsdp2", "fsdp1", "whole"]


_BACKWARD, _OPTIMIZER = "backward", "optimizer"


_COMPUTES = frozenset({"forward", _BACKWARD, "evaluate", "prefill", "decode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Say how a run is sharded. Units are the decoder layers, and the root with all that lies outside them."""

    world_size: int
    kind: Kind = "fsdp2"  # whole: nothing is sharded, which leaves only what goes to the CPU
    prefetch: bool = True  # the next unit is gathered while this one's gradients are computed
    # To the CPU: the optimizer's state and its step; weights: these and the gradients, too.
    offload: Literal["none", "optimizer", "weights"] = "none"
    in_one_memory: bool = False  # what goes to the CPU stays where the device computes, which is the CPU
    precision: Precision = field(default_factory=Precision)
    reentrant_checkpoints: bool = False  # around FSDP1's units: no unit is prefetched, and hooks keep what they watch

    @property
    def shards(self) -> bool:
        """Return whether weights are sharded, be it over one rank."""
        return self.kind != "whole"

    def on(self, device: Device) -> Sharding:
        """Return what of it concerns a device's own memory: a CPU's holds what is offloaded to it, too."""
        if not device.is_cpu:
            return self
        return replace(self, in_one_memory=True) if self.copies_trained else replace(self, offload="none")

    @property
    def copies_trained(self) -> bool:
        """Return whether the optimizer steps on copies of whole weights, by copies of their gradients."""
        return self.offload == "optimizer" and not self.shards

    @property
    def has_host(self) -> bool:
        """Return whether a run has something on a host beside the device."""
        return self.offload == "weights" or (self.copies_trained and not self.in_one_memory)


@dataclass(frozen=True, slots=True)
class ShardedStream:
    """Hold the stream of one rank."""

    stream: EventStream
    cuda_streams: tuple[int, ...]  # of each storage: each CUDA stream has blocks of its own in the caching allocator
    numbers: Mapping[int, int]  # recorded storage -> the rank's, where it has one


def shard(stream: EventStream, weights: Sequence[Weight], sharding: Sharding) -> ShardedStream:
    """Return the stream of rank 0.

    weights: the parameters that are sharded. Others, and what is not a parameter (buffers, the scales of quantised
    weights), are whole on each rank, as are gradients in units without a sharded parameter that is trained.
    """
    tape = Tape()
    if sharding.kind == "whole" and sharding.offload == "none":
        numbers = range(len(stream.sizes))
        return ShardedStream(stream, (COMPUTE,) * len(numbers), dict(zip(numbers, numbers, strict=True)))
    if sharding.in_one_memory:
        return _beside_copies(stream, weights)
    walk = _Walk(stream, weights, sharding, tape)
    marks = list(stream.marks)
    for position in range(len(stream.storages)):
        while marks and marks[0][0] == position:
            walk.mark(marks.pop(0)[1])
        walk.step(position)
    walk.leave_phase()
    for _, label in marks:
        tape.stream.mark(label)
    return ShardedStream(tape.stream, tuple(tape.cuda_streams), walk.numbers)


def _beside_copies(stream: EventStream, weights: Sequence[Weight]) -> ShardedStream:
    """Return the stream with copies of what trains, and of its gradients, from the end of loading on."""
    num_bytes = 2 * sum(weight.elements * weight.element_bytes for weight in weights if weight.trainable)
    phases = (position for position, place in enumerate(stream.places) if place.phase != "load")
    at, copies = next(phases, len(stream.places)), len(stream.sizes)
    out = EventStream(
        sizes=[*stream.sizes, num_bytes],
        categories=[*stream.categories, "optimizer_state"],
        storages=[*stream.storages[:at], copies, *stream.storages[at:]],
        places=[*stream.places[:at], Place("load", operator="memory.offload"), *stream.places[at:]],
        marks=[(position + (position >= at), label) for position, label in stream.marks],
    )
    return ShardedStream(out, (COMPUTE,) * len(out.sizes), {number: number for number in range(copies)})


class _Walk:
    """Repeat the recorded events one by one, and decide when units are gathered, freed and reduced."""

    def __init__(self, stream: EventStream, weights: Sequence[Weight], sharding: Sharding, tape: Tape) -> None:
        self._stream, self._sharding, self._tape = stream, sharding, tape
        sharded = Sharded(
            units={} if sharding.kind == "whole" else units(weights),
            world_size=sharding.world_size,
            precision=sharding.precision,
            offload=sharding.offload == "weights",
        )
        self._whole = FullyShard(tape, sharded) if sharding.kind == "fsdp2" else FlatShards(tape, sharded)
        self._weights = {weight.storage: weight for weight in weights}
        self._layers = layer_of_events(stream)
        self._optimizer_sizes = sharded_sizes(
            weights,
            world_size=sharding.world_size,
            precision=sharding.precision,
            by_rows=sharding.kind != "fsdp1",
        )
        watches = sharding.kind == "fsdp1" and sharding.reentrant_checkpoints
        self._prefetches = sharding.prefetch and not watches
        frozen = {weight.layer for weight in weights if not weight.trainable}
        self._trained = {weight.layer for weight in weights if weight.trainable}
        self._watched = storages_kept_by_hooks(stream, self._layers, frozen) if watches else frozenset()
        self._added = gradients_added(stream, self._layers, weights)
        late = late_prefetches(stream, self._layers, weights) if sharding.kind == "fsdp1" else {}
        self._prefetch_at, self._prefetched_late = frozenset(late), frozenset(late.values())
        self.numbers: dict[int, int] = {}  # recorded storage -> the rank's, where it has one
        self._kept: list[int] = []  # by hooks, until the backward pass is over
        self._phase = ""
        self._layer: int | None = None
        self._order: list[int] = []  # layers in the order of the forward pass
        self._gradients: dict[int | None, list[int]] = {}  # whole ones of a unit, not yet reduced
        self._unit_of: dict[int, int | None] = {}  # recorded gradient -> unit
        self._alive: Counter[int | None] = Counter()  # recorded gradients by unit
        self._shards: dict[int | None, list[int]] = {}  # sharded gradients of a unit
        self._stale: list[int] = []  # sharded gradients that FSDP1 drops when the next forward pass begins

    def mark(self, label: str) -> None:
        """End the pass before the mark."""
        self.leave_phase()
        self._tape.stream.mark(label)

    def step(self, position: int) -> None:
        """Repeat one recorded event."""
        storage, place = self._stream.storages[position], self._stream.places[position]
        if storage < 0:
            self._bury(~storage, place)
            return
        self._move(place, self._layers[position])
        if position in self._prefetch_at and self._layer in self._order:
            self._prefetch_before(self._order.index(self._layer))
        self._bear(storage, place)

    def _move(self, place: Place, layer: int | None) -> None:
        """Leave the unit that computed and gather the one that will."""
        if place.phase != self._phase:
            self.leave_phase()
            self._enter_phase(place.phase)
        elif layer != self._layer:
            self._leave_layer()
        if layer != self._layer and place.phase in _COMPUTES:
            self._enter_layer(layer)

    def _enter_phase(self, phase: str) -> None:
        self._phase = phase
        self._tape.stand_at(phase, None)
        if phase not in _COMPUTES:
            return
        if phase != _BACKWARD:
            self._order = []
            self._tape.free(self._stale, "reset_gradients")
            self._stale = []
        self._whole.gather(None, backward=phase == _BACKWARD)
        if phase == _BACKWARD:
            self._prefetch_before(len(self._order))

    def leave_phase(self) -> None:
        """End the pass, or the stream."""
        self._leave_layer()
        self._tape.stand_at(self._phase, None)
        if self._phase == _BACKWARD:
            self._reduce(None)
            self._whole.end_backward()
            self._tape.free(self._kept, "end_backward")
            self._kept = []
        elif self._phase in _COMPUTES:
            self._whole.end_forward()
        self._phase = ""

    def _enter_layer(self, layer: int | None) -> None:
        self._layer = layer
        if layer is None:
            return
        self._tape.stand_at(self._phase, layer)
        self._whole.gather(layer, backward=self._phase == _BACKWARD)
        if self._phase != _BACKWARD:
            self._order.append(layer)
        elif layer in self._order and layer not in self._prefetched_late:
            self._prefetch_before(self._order.index(layer))

    def _leave_layer(self) -> None:
        layer, self._layer = self._layer, None
        if layer is None:
            return
        self._tape.stand_at(self._phase, layer)
        if self._phase == _BACKWARD:
            self._reduce(layer)
        else:  # the root stays whole until its backward pass is over
            self._whole.reshard(layer)

    def _prefetch_before(self, position: int) -> None:
        if self._prefetches and position > 0:
            self._whole.prefetch(self._order[position - 1])

    def _reduce(self, layer: int | None) -> None:
        """Reduce a unit's gradients; they are added to those that are there from an earlier micro-batch."""
        shards = self._whole.reduce(layer, self._gradients.pop(layer, []))
        if layer in self._shards:
            self._tape.free(shards, "accumulate")
        elif shards:
            self._shards[layer] = shards

    def _bear(self, storage: int, place: Place) -> None:
        num_bytes, category = self._stream.sizes[storage], self._stream.categories[storage]
        if storage in self._weights:
            on_cpu = self._sharding.offload == "weights"
            num_bytes = 0 if on_cpu else self._whole.shard(self._weights[storage])
        elif place.phase == _OPTIMIZER:
            num_bytes = 0 if self._sharding.offload != "none" else self._optimizer_sizes.get(num_bytes, num_bytes)
        if num_bytes == 0 and self._stream.sizes[storage]:
            return
        self.numbers[storage] = number = self._tape.repeat(num_bytes, category, place)
        is_gradient = place.phase == _BACKWARD and (category == "gradients" or storage in self._added)
        if not is_gradient or self._layer not in self._trained:
            return
        self._gradients.setdefault(self._layer, []).append(number)
        if category == "gradients":
            self._unit_of[storage] = self._layer
            self._alive[self._layer] += 1

    def _bury(self, storage: int, place: Place) -> None:
        number = self.numbers.get(storage)
        if storage in self._unit_of:
            self._drop_gradient(storage, place)
        elif storage in self._added:
            return
        elif number is not None and storage in self._watched:
            self._kept.append(number)
        elif number is not None:
            self._tape.stream.death(number, place)

    def _drop_gradient(self, storage: int, place: Place) -> None:
        """Drop a gradient; with the last of a unit go its shards, which are one storage.

        FSDP1's flat gradient outlives `zero_grad`, which sees the original parameters' views only.
        """
        layer = self._unit_of.pop(storage)
        self._alive[layer] -= 1
        if self._alive[layer]:
            return
        shards = self._shards.pop(layer, [])
        if self._sharding.kind == "fsdp1":
            self._stale += shards
            return
        for shard_ in shards:
            self._tape.stream.death(shard_, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """Hold what one rank has of what is offloaded on the host, and what it copies to the device and back."""

    num_bytes: int = 0  # of weights, gradients and the optimizer's state
    copied_bytes: int = 0  # by each micro-batch
    update_bytes: int = 0  # copied once a step
    state_bytes: int = 0  # of the optimizer, of num_bytes

    @classmethod
    def of(cls, stream: EventStream, weights: Iterable[Weight], sharding: Sharding) -> OnHost:
        """Count them. Layers are brought forward and backward, the root stays; what trains has gradients.

        Where the optimizer alone is offloaded, weights that train are copied there to step, and back.
        PyTorch pins the memory of weights and gradients, tensor by tensor, in blocks whose sizes are powers of two.
        stream: of whole steps on one GPU.
        """
        died = {~storage for storage in stream.storages if storage < 0}
        state = enumerate(zip(stream.sizes, stream.categories, strict=True))
        state_bytes = sum(size for each, (size, kind) in state if kind == "optimizer_state" and each not in died)
        state_bytes //= sharding.world_size
        held = [
            (shard_elements(each.shape, sharding.world_size) * each.element_bytes, each)
            for each in weights
            if each.trainable or not sharding.copies_trained
        ]
        pinned_bytes = sum((1 + each.trainable) << max(size - 1, 0).bit_length() for size, each in held)
        if sharding.copies_trained:
            copied = {"update_bytes": sum(2 * size for size, _ in held)}
        else:
            copied = {
                "copied_bytes": sum((1 + (each.layer is not None) + each.trainable) * size for size, each in held)
            }
        return cls(num_bytes=pinned_bytes + state_bytes, state_bytes=state_bytes, **copied)


def late_prefetches(stream: EventStream, layers: list[int | None], weights: Sequence[Weight]) -> dict[int, int]:
    """Return layers with adapters, by the event before which the layer ahead is gathered. layers: of each event."""
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
    """Return the module of the first parameter that is trained, in each layer that has frozen ones, too."""
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
