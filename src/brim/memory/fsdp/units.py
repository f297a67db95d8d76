"""Write what FSDP1 and FSDP2 allocate and free around each unit, whose parameters they shard.

A unit is a decoder layer, or the root, which holds the rest. FSDP2 (`torch.distributed.fsdp.fully_shard`) splits each
parameter along its first dimension; FSDP1 (`FullyShardedDataParallel`) writes the parameters of a unit into one flat
parameter and splits that. Figures are those of rank 0, whose shard is never the smaller one. FSDP1 is read from
torch.distributed.fsdp (_runtime_utils.py, _flat_param.py) of torch 2.13; FSDP2 from
torch.distributed.fsdp._fully_shard (_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py), torch 2.13. brim
does not train with FSDP1: public measurements do.

FSDP1's hooks keep storages alive when reentrant checkpoints lie around units of frozen parameters. A frozen unit has
no gradient whose accumulation could say that its backward pass is over, so FSDP1 watches the unit's inputs
(`_register_post_backward_reshard_only_hook`) through `torch.autograd.graph.register_multi_grad_hook`, which holds
their autograd nodes until the whole backward pass is over. A reentrant checkpoint recomputes from inputs that are
leaves: the node of a leaf holds the leaf, and with it its gradient. So the inputs of all layers and their gradients
stay. Public runs on 2 and 4 GPUs show it to the byte: docs/decisions/0012-sharding-in-the-prediction.md.

The stream of one rank is what is kept of a recorded stream, with what sharding adds to it. Of a recorded stream it
must be known which layer each event belongs to, and which gradients are added to others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from brim.memory.events import Category, EventStream, Place, Weight


def storages_kept_by_hooks(stream: EventStream, layers: list[int | None], frozen: Set[int | None]) -> frozenset[int]:
    """Return storages that outlive their recorded death. layers: of each event; frozen: layers with frozen weights."""
    born: dict[int, tuple[str, int | None]] = {}
    kept = set()
    for storage, place, layer in zip(stream.storages, stream.places, layers, strict=True):
        if storage >= 0:
            born[storage] = (place.phase, layer)
        elif place.phase == "backward" and layer is not None and layer in frozen:
            phase, born_in = born.pop(~storage)
            is_input = phase == "forward" and born_in == (layer - 1 if layer else None)
            is_gradient_of_next_input = phase == "backward" and born_in == layer + 1
            if is_input or is_gradient_of_next_input:
                kept.add(~storage)
    return frozenset(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Say what is sharded, and over how many ranks."""

    units: Mapping[int | None, Sequence[Weight]]
    world_size: int
    precision: Precision
    offload: bool  # weights and gradients lie on the CPU


class FlatShards:
    """Write parameters into flat ones, which are sharded, and gathered straight into place.

    Parameters of no unit are whole on each rank, and their gradients stay as they were computed.
    """

    def __init__(self, tape: Tape, sharded: Sharded) -> None:
        self._tape, self._world_size = tape, sharded.world_size
        self._precision, self._offload = sharded.precision, sharded.offload
        self._units = {layer: flat_parameters(weights) for layer, weights in sharded.units.items()}
        self._flat = {flat.weights[0].storage: flat for flats in self._units.values() for flat in flats}
        self._whole: dict[int | None, list[int]] = {}
        self._offloaded: list[int] = []  # sharded gradients, copied to the CPU and kept until the pass is over

    def shard(self, weight: Weight) -> int:
        """Return the bytes that the rank keeps: those of the flat parameter for the first in it, 0 for the others."""
        if weight.layer not in self._units:
            return weight.elements * weight.element_bytes
        flat = self._flat.get(weight.storage)
        return 0 if flat is None else flat.shard_elements(self._world_size) * self._precision.in_shards(weight)

    def gather(self, layer: int | None, *, backward: bool) -> None:
        """Make the unit's parameters whole before its forward or its backward pass.

        Adapters within a layer are gathered one after the other: one is whole beside the layer's own parameters, the
        last one from the beginning of the layer's backward pass on, since BACKWARD_PRE gathers it with the layer.
        """
        if layer not in self._whole:
            flats = self._units.get(layer, [])
            self._whole[layer] = [self._all_gather(flat) for flat in (*flats[:1], *flats[1:][-1:])]

    def prefetch(self, layer: int | None) -> None:
        """Gather while another unit computes."""
        self.gather(layer, backward=True)

    def reshard(self, layer: int | None) -> None:
        """Drop the whole parameters."""
        self._tape.free(self._whole.pop(layer, ()), "reshard")

    def reduce(self, layer: int | None, gradients: Sequence[int]) -> list[int]:
        """Drop the whole parameters and shard their gradients. Returns the storages of the shards."""
        if layer not in self._units:
            return list(gradients)
        trained = [flat for flat in self._units[layer] if flat.weights[0].trainable] if gradients else []
        whole = list(gradients)
        if any(len(flat.weights) > 1 for flat in trained):  # autograd joins the gradients of the views
            num_bytes = sum(self._bytes(flat, self._world_size) for flat in trained)
            joined = self._tape.allocate(num_bytes, "gradients", "join_gradients")
            self._tape.free(whole, "join_gradients")
            whole = [joined]
        self.reshard(layer)
        shards = [self._reduce_scatter(flat) for flat in trained]
        self._tape.free(whole, "reduce_scatter")
        if self._offload:
            self._offloaded += shards
            return []
        return shards

    def end_forward(self) -> None:
        """End the root's forward pass."""

    def end_backward(self) -> None:
        """End the backward pass."""
        self._tape.free(self._offloaded, "end_backward")
        self._offloaded = []

    def _bytes(self, flat: FlatParameter, shards: int) -> int:
        """Return the bytes of some shards as they are gathered and reduced."""
        return shards * flat.shard_elements(self._world_size) * self._precision.gathered(flat.weights[0])

    def _all_gather(self, flat: FlatParameter) -> int:
        """Gather; from a copy of the shard where it is on the CPU or wider than what is gathered."""
        first = flat.weights[0]
        is_copied = self._offload or self._precision.in_shards(first) != self._precision.gathered(first)
        copy = []
        if is_copied:
            copy = [self._tape.allocate(self._bytes(flat, 1), "temporary", "pre_unshard", cuda_stream=COPY)]
        num_bytes = self._bytes(flat, self._world_size)
        whole = self._tape.allocate(num_bytes, "weights", "all_gather", cuda_stream=GATHER)
        self._tape.free(copy, "post_unshard")
        return whole

    def _reduce_scatter(self, flat: FlatParameter) -> int:
        reduced = self._tape.allocate(self._bytes(flat, 1), "gradients", "reduce_scatter", cuda_stream=REDUCE)
        wire, kept = self._precision.gathered(flat.weights[0]), self._precision.in_shards(flat.weights[0])
        if wire == kept:
            return reduced
        wide = self._tape.allocate(
            flat.shard_elements(self._world_size) * kept, "gradients", "cast_gradient", cuda_stream=REDUCE
        )
        self._tape.free([reduced], "cast_gradient")
        return wide


class FullyShard:
    """Split parameters one by one, and gather them through one buffer a unit."""

    def __init__(self, tape: Tape, sharded: Sharded) -> None:
        self._tape, self._units, self._world_size = tape, sharded.units, sharded.world_size
        self._precision, self._offload = sharded.precision, sharded.offload
        self._whole: dict[int | None, list[int]] = {}
        self._buffers: dict[int | None, int] = {}  # gathered, not yet copied out
        self._last_buffer: list[int] = []  # of the forward pass: freed after the next one was copied out
        self._reduced: list[int] = []  # the input of the last reduction, kept until the next one

    def shard(self, weight: Weight) -> int:
        """Return the bytes that the rank keeps of a parameter."""
        return shard_elements(weight.shape, self._world_size) * self._precision.in_shards(weight)

    def gather(self, layer: int | None, *, backward: bool) -> None:
        """Make the unit's parameters whole before its forward or its backward pass."""
        if layer in self._whole:
            return
        self.prefetch(layer)
        self._whole[layer] = list(self._brought(layer))
        buffer = [self._buffers.pop(layer)] if layer in self._buffers else []
        if backward:
            self._tape.free(buffer, "all_gather_copy_out")
        else:
            self._free_last_buffer()
            self._last_buffer = buffer

    def _brought(self, layer: int | None) -> Iterator[int]:
        """Allocate whole parameters, one after the other.

        One rank alone gathers nothing: each is copied from what was brought of it from the CPU, and a variable holds
        that until the next one has been brought (`FSDPParamGroup.wait_for_unshard`).
        """
        brought: list[int] = []
        for weight in self._units.get(layer, ()):
            if self._offload and self._world_size == 1:
                copy = self._tape.allocate(self.shard(weight), "temporary", "copy_from_host")
                self._tape.free(brought, "copy_from_host")
                brought = [copy]
            yield self._tape.allocate(self._gathered(weight), "weights", "all_gather_copy_out")
        self._tape.free(brought, "copy_from_host")

    def prefetch(self, layer: int | None) -> None:
        """Gather into the buffer alone, while another unit computes."""
        if layer in self._whole or layer in self._buffers or self._world_size == 1 or not self._units.get(layer):
            return
        copies = self._copies(layer)
        num_bytes = sum(self._gathered(weight) for weight in self._units[layer])
        self._buffers[layer] = self._tape.allocate(num_bytes, "temporary", "all_gather", cuda_stream=GATHER)
        self._tape.free(copies, "all_gather_copy_in")

    def reshard(self, layer: int | None) -> None:
        """Drop the whole parameters."""
        self._tape.free(self._whole.pop(layer, ()), "reshard")

    def reduce(self, layer: int | None, gradients: Sequence[int]) -> list[int]:
        """Drop the whole parameters and shard their gradients. Returns the storages of the shards."""
        self.reshard(layer)
        self._tape.free(self._reduced, "reduce_scatter")
        self._reduced = []
        if not gradients:
            return []
        trained = [weight for weight in self._units.get(layer, ()) if weight.trainable]
        elements = sum(shard_elements(weight.shape, self._world_size) for weight in trained)
        wire, kept = self._precision.gathered(trained[0]), self._precision.in_shards(trained[0])
        whole = elements * self._world_size * wire
        self._reduced = [self._tape.allocate(whole, "temporary", "reduce_scatter_copy_in")]
        self._tape.free(gradients, "reduce_scatter_copy_in")
        shards = [self._tape.allocate(elements * wire, "gradients", "reduce_scatter", cuda_stream=REDUCE)]
        if kept != wire:
            wide = self._tape.allocate(elements * kept, "gradients", "reduce_scatter", cuda_stream=REDUCE)
            self._tape.free(shards, "reduce_scatter")
            shards = [wide]
        if self._offload:
            self._tape.free(shards, "offload")
            return []
        return shards

    def end_forward(self) -> None:
        """End the root's forward pass."""
        self._free_last_buffer()

    def end_backward(self) -> None:
        """End the backward pass."""
        self._tape.free(self._reduced, "end_backward")
        self._tape.free(self._buffers.values(), "end_backward")
        self._reduced, self._buffers = [], {}

    def _gathered(self, weight: Weight) -> int:
        padded = shard_elements(weight.shape, self._world_size) * self._world_size
        return padded * self._precision.gathered(weight)

    def _copies(self, layer: int | None) -> list[int]:
        """Allocate shards that are brought from the CPU, or cast, for as long as they are written into the buffer."""
        weights = self._units[layer]
        if self._offload:
            return [
                self._tape.allocate(self.shard(weight), "temporary", "all_gather_copy_in", cuda_stream=GATHER)
                for weight in weights
            ]
        if self._precision.gathered_bytes is None:
            return []
        cast = sum(self._gathered(weight) for weight in weights) // self._world_size
        return [self._tape.allocate(cast, "temporary", "all_gather_copy_in", cuda_stream=GATHER)]

    def _free_last_buffer(self) -> None:
        self._tape.free(self._last_buffer, "all_gather_copy_out")
        self._last_buffer = []


_ELEMENT_BYTES = (1, 2, 4, 8)


_SCALED_BLOCK = 256  # elements that share a 4-byte scale in bitsandbytes' 8-bit states (bitsandbytes.optim.optimizer)


def sharded_sizes(weights: Iterable[Weight], *, world_size: int, precision: Precision, by_rows: bool) -> dict[int, int]:
    """Map bytes of a tensor of each trainable parameter's shape to bytes of one of its shard's shape.

    The optimizer computes element by element, so that what it allocates has the shape of a parameter, or of its
    blocks' scales; anything of another size (a step's count, a norm) is not sharded. Where two parameters of one size
    have shards of different size the larger one counts. by_rows: FSDP2 splits along the first dimension; FSDP1 splits a
    flat parameter anywhere, so that on average each rank has an equal part of each of its parameters.
    """
    sizes: dict[int, int] = {}
    for weight in weights:
        if not weight.trainable:
            continue
        whole = weight.elements
        part = shard_elements(weight.shape, world_size) if by_rows else -(-whole // world_size)
        kept = precision.in_shards(weight)
        shard_sizes = {size: part * (kept if size == weight.element_bytes else size) for size in _ELEMENT_BYTES}
        pairs = [(whole * size, shard_bytes) for size, shard_bytes in shard_sizes.items()]
        if whole > _SCALED_BLOCK:
            pairs.append((4 * -(-whole // _SCALED_BLOCK), 4 * -(-part // _SCALED_BLOCK)))
        for whole_bytes, shard_bytes in pairs:
            sizes[whole_bytes] = max(shard_bytes, sizes.get(whole_bytes, 0))
    return sizes


_ADD_IN_PLACE = "aten::add_"


def layer_of_events(stream: EventStream) -> list[int | None]:
    """Return the layer of each event; None outside the layers.

    What happens outside any module between a layer and its neighbour in the same pass, or amid one layer, belongs to
    that layer: a unit is not left for it.
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
    """Return gradients of a later micro-batch: in a recording, storages that die when they are added in place.

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


COMPUTE, GATHER, REDUCE, COPY = 0, 1, 2, 3  # CUDA streams: each has blocks of its own in the caching allocator


class Tape:
    """Write an event stream, with the CUDA stream on which each storage is allocated."""

    def __init__(self) -> None:
        self.stream = EventStream()
        self.cuda_streams: list[int] = []  # of each storage
        self._phase = ""
        self._layer: int | None = None

    def stand_at(self, phase: str, layer: int | None) -> None:
        """Set where the next events of sharding happen."""
        self._phase, self._layer = phase, layer

    def allocate(self, num_bytes: int, category: Category, operator: str, *, cuda_stream: int = COMPUTE) -> int:
        """Append the birth of a storage that sharding adds, and return its number."""
        self.cuda_streams.append(cuda_stream)
        return self.stream.birth(num_bytes, category, self._place(operator))

    def repeat(self, num_bytes: int, category: Category, place: Place) -> int:
        """Append the birth of a storage that was recorded, and return its number."""
        self.cuda_streams.append(COMPUTE)
        return self.stream.birth(num_bytes, category, place)

    def free(self, storages: Iterable[int], operator: str) -> None:
        """Append the deaths of storages."""
        place = self._place(operator)
        for storage in storages:
            self.stream.death(storage, place)

    def _place(self, operator: str) -> Place:
        return Place(self._phase, self._layer, "", f"fsdp::{operator}")


_ALIGNMENT_BYTES = 16  # of each parameter in a flat one that keeps its originals: FlatParamHandle._get_aligned_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Hold the bytes of an element where FSDP's mixed precision changes them; None: those of the parameter."""

    shard_bytes: int | None = None  # of trainable parameters, which accelerate keeps in fp32 under mixed precision
    gathered_bytes: int | None = None  # of parameters wider than this, and of the gradients that are reduced

    def in_shards(self, weight: Weight) -> int:
        """Return the bytes of an element of the sharded parameter and its gradient."""
        if weight.trainable and self.shard_bytes is not None:
            return max(self.shard_bytes, weight.element_bytes)
        return weight.element_bytes

    def gathered(self, weight: Weight) -> int:
        """Return the bytes of an element of the whole parameter, and of the gradient that is reduced."""
        stored = self.in_shards(weight)
        return stored if self.gathered_bytes is None else min(stored, self.gathered_bytes)


def shard_elements(shape: Sequence[int], world_size: int) -> int:
    """Return the elements of one padded shard along the first dimension."""
    rows = shape[0] if shape else 1
    return -(-rows // world_size) * math.prod(shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """Hold parameters of equal storage that FSDP1 writes one after the other; all of them are trained, or none."""

    weights: tuple[Weight, ...]

    def shard_elements(self, world_size: int) -> int:
        """Return the elements of one shard: each parameter begins at 16 bytes, the end is padded to the ranks."""
        elements = 0
        for weight in self.weights:
            step = max(1, _ALIGNMENT_BYTES // weight.element_bytes)
            elements = -(-elements // step) * step + weight.elements
        return -(-elements // world_size)


def flat_parameters(weights: Iterable[Weight]) -> list[FlatParameter]:
    """Return FSDP1's flat parameters of one unit and the units within it.

    Where only some parameters are trained (adapters), PEFT's wrapping policy makes each of those a unit of its own.
    """
    weights = list(weights)
    frozen = tuple(weight for weight in weights if not weight.trainable)
    trained = tuple(weight for weight in weights if weight.trainable)
    if not frozen:
        return [FlatParameter(weights=trained)] if trained else []
    return [FlatParameter(weights=frozen), *(FlatParameter(weights=(weight,)) for weight in trained)]


def units(weights: Iterable[Weight]) -> dict[int | None, tuple[Weight, ...]]:
    """Return the parameters of each decoder layer, and under None those of the root: what lies outside the layers."""
    found: dict[int | None, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.layer, []).append(weight)
    return {layer: tuple(members) for layer, members in found.items()}
