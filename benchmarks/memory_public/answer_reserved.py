"""Add to the reserved memory of the Answer.AI runs: wrapping, and blocks that wait for a CUDA stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from brim.memory.events import EventStream, Place, Weight
from brim.memory.fsdp import ShardedStream
from brim.memory.fsdp.units import GATHER, FlatParameter, flat_parameters, units

_LOAD = Place("load")
_BUCKET_BYTES = 250 * 2**20  # PARAM_BROADCAST_BUCKET_SIZE, torch/distributed/fsdp/_init_utils.py
_IN_FLIGHT = 2  # gatherings that may wait: _FreeEventQueue, torch/distributed/fsdp/_limiter_utils.py


def with_output_kept(stream: EventStream, num_bytes: int) -> EventStream:
    """The logits stay until the optimizer has stepped: the last storage of their size to die in each step."""
    begins = [at for at, label in stream.marks if label.startswith("step") and "optimizer" not in label]
    ends = [*begins[1:], len(stream.storages)]
    moved: dict[int, int] = {}  # the last position of a step -> the death that follows it
    for start, end in zip(begins, ends, strict=True):
        deaths = (at for at in range(start, end) if stream.storages[at] < 0)
        moved[end - 1] = [at for at in deaths if stream.sizes[~stream.storages[at]] == num_bytes][-1]
    taken = set(moved.values())
    order: list[int] = []
    for at in range(len(stream.storages)):
        order.extend([] if at in taken else [at])
        order.extend([moved[at]] if at in moved else [])
    new = {at: position for position, at in enumerate(order)}
    return EventStream(
        sizes=stream.sizes,
        categories=stream.categories,
        storages=[stream.storages[at] for at in order],
        places=[stream.places[at] for at in order],
        marks=[(new.get(at, at), label) for at, label in stream.marks],
    )


def with_wrapping(rank: ShardedStream, weights: Sequence[Weight], *, world_size: int) -> ShardedStream:
    """Each unit is brought from the CPU, compared with the other ranks', joined and cut; layers first, the root last.

    rank: the stream of the steps, which begins with the births of the shards, or without them where they are offloaded.
    What is not cut, such as the scales of quantised weights, was left on the GPU when the model was loaded.
    """
    given, out = rank.stream, EventStream()
    numbers: dict[int, int] = {}  # the storages of `rank` that are born here
    cut = {rank.numbers.get(weight.storage) for weight in weights}
    for storage, place in zip(given.storages, given.places, strict=True):
        if storage >= 0 and place.phase == "load" and storage not in cut:
            numbers[storage] = out.birth(given.sizes[storage], given.categories[storage], place)
    by_layer = units(weights)
    for layer in (*sorted(layer for layer in by_layer if layer is not None), None):
        base, *adapters = flat_parameters(by_layer.get(layer, ()))
        for flat in (*adapters, base):  # adapters lie within the layer's unit, and are wrapped before
            shard = _wrap(out, flat, world_size)
            known = rank.numbers.get(flat.weights[0].storage)
            if known is None:
                out.death(shard, _LOAD)
            else:
                numbers[known] = shard
    cuda_streams = [0] * len(out.sizes)
    for storage, place in zip(given.storages, given.places, strict=True):
        if storage < 0:
            out.death(numbers[~storage], place)
        elif storage not in numbers:
            numbers[storage] = out.birth(given.sizes[storage], given.categories[storage], place)
            cuda_streams.append(rank.cuda_streams[storage])
    return ShardedStream(out, tuple(cuda_streams), {})


def _wrap(stream: EventStream, flat: FlatParameter, world_size: int) -> int:
    """Do as `_init_param_handle_from_module` of torch/distributed/fsdp/_init_utils.py; return the shard.

    The buckets were sent on NCCL's CUDA stream: their blocks are not free again at once.
    """
    sizes = [weight.elements * weight.element_bytes for weight in flat.weights]
    parameters = [stream.birth(num_bytes, "weights", _LOAD) for num_bytes in sizes]
    buckets = [stream.birth(num_bytes, "temporary", _LOAD) for num_bytes in _buckets(sizes)]
    joined = stream.birth(sum(sizes), "temporary", _LOAD)
    shard = stream.birth(flat.shard_elements(world_size) * flat.weights[0].element_bytes, "weights", _LOAD)
    _free(stream, [*buckets, joined, *parameters])
    return shard


def _buckets(sizes: Iterable[int]) -> list[int]:
    """compute_bucket_assignment_by_size: a bucket is full once it reaches its size."""
    buckets, now = [], 0
    for num_bytes in sizes:
        now += num_bytes
        if now >= _BUCKET_BYTES:
            buckets.append(now)
            now = 0
    return buckets + [now] * (now > 0)


def _free(stream: EventStream, storages: Iterable[int]) -> None:
    for storage in storages:
        stream.death(storage, _LOAD)


def with_late_reuse(rank: ShardedStream) -> ShardedStream:
    """Gathered parameters are used on another CUDA stream than that of their blocks, which are free again only when
    that one has come so far: the CPU runs ahead until two gatherings wait, and to the reading of the loss."""
    given = rank.stream
    out = EventStream(sizes=given.sizes, categories=given.categories)
    waiting: list[tuple[int, Place]] = []

    def release(num_waiting: int) -> None:
        while len(waiting) > num_waiting:
            storage, place = waiting.pop(0)
            out.storages.append(storage)
            out.places.append(place)

    for storage, place in zip(given.storages, given.places, strict=True):
        if place.phase == "optimizer":
            release(0)
        if storage >= 0 and rank.cuda_streams[storage] == GATHER:
            release(_IN_FLIGHT - 1)
        if storage < 0 and rank.cuda_streams[~storage] == GATHER:
            waiting.append((storage, place))
        else:
            out.storages.append(storage)
            out.places.append(place)
    release(0)
    return ShardedStream(out, rank.cuda_streams, rank.numbers)
