"""The stream of one rank, against bytes worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from brim.memory.fsdp import Sharding, shard
from brim.memory.fsdp.units import Precision
from brim.memory.trace import Category, EventStream, Place, Weight

LAYERS = 3
EMBEDDING, MATRIX, HIDDEN = 1200, 800, 40  # bytes of the root's weight, of a layer's weight, of an activation
LOAD, FORWARD, BACKWARD, OPTIMIZER = (Place(phase) for phase in ("load", "forward", "backward", "optimizer"))


def weights(*, trainable: bool = True, rows: int = 20) -> list[Weight]:
    """Storage 0 is the root's, 1 to LAYERS the layers'; 4 bytes an element."""
    root = Weight(storage=0, shape=(60, 5), element_bytes=4, layer=None, trainable=trainable)
    shape = (rows, MATRIX // 4 // rows)
    layers = [
        Weight(storage=1 + layer, shape=shape, element_bytes=4, layer=layer, trainable=trainable)
        for layer in range(LAYERS)
    ]
    return [root, *layers]


def step(*, trainable: bool = True) -> EventStream:
    """One step as a recorder sees it: each layer keeps its input for the backward pass."""
    stream = EventStream()
    stream.mark("load")
    stream.birth(EMBEDDING, "weights", LOAD)
    for layer in range(LAYERS):
        stream.birth(MATRIX, "weights", Place("load", layer))
    stream.mark("step 1")
    inputs = [stream.birth(HIDDEN, "activations", FORWARD)]
    for layer in range(LAYERS):
        inputs.append(stream.birth(HIDDEN, "activations", Place("forward", layer)))
    loss = stream.birth(HIDDEN, "logits_and_loss", FORWARD)
    gradient = stream.birth(HIDDEN, "temporary", BACKWARD)
    gradients = [stream.birth(EMBEDDING, "gradients", BACKWARD)] if trainable else []
    stream.death(loss, BACKWARD)
    for layer in reversed(range(LAYERS)):
        place = Place("backward", layer)
        of_input = stream.birth(HIDDEN, "temporary", place)
        stream.death(gradient, place)
        if trainable:
            gradients.append(stream.birth(MATRIX, "gradients", place))
        stream.death(inputs[layer], place)
        gradient = of_input
    stream.death(gradient, BACKWARD)
    stream.death(inputs[LAYERS], BACKWARD)
    if trainable:
        sizes = [EMBEDDING] + LAYERS * [MATRIX]
        for size in [*sizes, *sizes]:
            stream.birth(size, "optimizer_state", OPTIMIZER)
        for storage in [stream.birth(size, "temporary", OPTIMIZER) for size in sizes]:
            stream.death(storage, OPTIMIZER)
    for storage in gradients:
        stream.death(storage, OPTIMIZER)
    stream.mark("end")
    return stream


def live(stream: EventStream) -> Iterator[tuple[Place, dict[Category, int]]]:
    """Live bytes by category after each event; every storage is born before it dies, and dies once."""
    now: dict[Category, int] = {}
    alive: set[int] = set()
    for storage, place in zip(stream.storages, stream.places, strict=True):
        if storage >= 0:
            assert storage not in alive
            alive.add(storage)
        else:
            alive.remove(~storage)
        which = storage if storage >= 0 else ~storage
        change = stream.sizes[which] if storage >= 0 else -stream.sizes[which]
        category = stream.categories[which]
        now[category] = now.get(category, 0) + change
        yield place, dict(now)


def peak(stream: EventStream, category: Category, phase: str) -> int:
    return max(now.get(category, 0) for place, now in live(stream) if place.phase == phase)


def at_end(stream: EventStream) -> dict[Category, int]:
    return {category: num_bytes for category, num_bytes in list(live(stream))[-1][1].items() if num_bytes}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_shards_of_weights_and_optimizer_sum_to_the_whole(kind: str, world_size: int) -> None:
    ranks = shard(step(), weights(), Sharding(world_size=world_size, kind=kind))
    end = at_end(ranks.stream)

    assert world_size * end["weights"] == EMBEDDING + LAYERS * MATRIX
    assert end["optimizer_state"] == 2 * end["weights"]
    assert not {"temporary", "activations"} & end.keys()
    assert len(ranks.cuda_streams) == len(ranks.stream.sizes)


def test_rows_that_do_not_divide_are_padded_in_fsdp2() -> None:
    end = at_end(shard(step(), weights(rows=25), Sharding(world_size=8)).stream)

    assert end["weights"] == 8 * 5 * 4 + LAYERS * 4 * 8 * 4  # ceil(60 / 8) rows of 5, ceil(25 / 8) rows of 8


def test_a_flat_parameter_is_padded_as_one_in_fsdp1() -> None:
    one = Weight(storage=0, shape=(3,), element_bytes=2, layer=None, trainable=False)
    two = Weight(storage=1, shape=(5,), element_bytes=2, layer=None, trainable=False)
    stream = EventStream()
    stream.birth(6, "weights", LOAD)
    stream.birth(10, "weights", LOAD)

    end = at_end(shard(stream, [one, two], Sharding(world_size=2, kind="fsdp1")).stream)

    assert end == {"weights": 2 * 7}  # 3, padded to 8 since each begins at 16 bytes, and 5: 13, half of it rounded up


def test_one_layer_and_the_buffer_of_its_forerunner_are_whole_in_the_forward_pass() -> None:
    stream = shard(step(), weights(), Sharding(world_size=2)).stream
    shards = (EMBEDDING + LAYERS * MATRIX) // 2

    assert peak(stream, "weights", "forward") == shards + EMBEDDING + MATRIX
    assert peak(stream, "temporary", "forward") == EMBEDDING + MATRIX  # the root's buffer beside the first layer's


def test_without_resharding_all_layers_stay_whole_until_their_gradients_are_cut() -> None:
    stream = shard(step(), weights(), Sharding(world_size=2, reshard_after_forward=False)).stream
    shards = (EMBEDDING + LAYERS * MATRIX) // 2

    assert peak(stream, "weights", "backward") == shards + EMBEDDING + LAYERS * MATRIX
    assert at_end(stream)["weights"] == shards


def test_the_backward_pass_of_fsdp2_prefetches_and_cuts_gradients_through_a_buffer() -> None:
    stream = shard(step(), weights(), Sharding(world_size=2)).stream
    points = [now for place, now in live(stream) if place == Place("backward", 1, "", "fsdp::reduce_scatter")]

    # the buffers: layer 0 prefetched, layer 1's gradients on their way; the layer's input gradient
    assert points[-1]["temporary"] == MATRIX + MATRIX + HIDDEN
    # the root's whole gradient, shards of layers 2 and 1
    assert points[-1]["gradients"] == EMBEDDING + 2 * MATRIX // 2
    assert peak(stream, "gradients", "backward") == EMBEDDING + 2 * MATRIX // 2 + MATRIX


def test_no_prefetch_means_no_buffer_of_the_next_layer() -> None:
    stream = shard(step(), weights(), Sharding(world_size=2, prefetch=False)).stream
    points = [now for place, now in live(stream) if place == Place("backward", 1, "", "fsdp::reduce_scatter")]

    assert points[-1]["temporary"] == MATRIX + HIDDEN


def test_gradients_are_gone_after_the_step_in_fsdp2_and_stay_until_the_next_in_fsdp1() -> None:
    assert "gradients" not in at_end(shard(step(), weights(), Sharding(world_size=2)).stream)

    flat = shard(step(), weights(), Sharding(world_size=2, kind="fsdp1")).stream
    assert at_end(flat)["gradients"] == (EMBEDDING + LAYERS * MATRIX) // 2


def test_fsdp1_drops_the_old_gradients_when_the_next_forward_pass_begins() -> None:
    stream = step()
    stream.mark("step 2")
    stream.birth(HIDDEN, "temporary", FORWARD)

    flat = shard(stream, weights(), Sharding(world_size=2, kind="fsdp1")).stream

    assert "gradients" not in at_end(flat)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_mixed_precision_keeps_fp32_shards_of_bf16_parameters(kind: str) -> None:
    stream = EventStream()
    stream.birth(8, "weights", LOAD)
    gradient = stream.birth(8, "gradients", BACKWARD)
    stream.birth(8, "optimizer_state", OPTIMIZER)
    stream.death(gradient, OPTIMIZER)
    weight = Weight(storage=0, shape=(4,), element_bytes=2, layer=None, trainable=True)

    precision = Precision(shard_bytes=4, gathered_bytes=2)
    cut = shard(stream, [weight], Sharding(world_size=2, kind=kind, precision=precision)).stream

    assert at_end(cut)["weights"] == 2 * 4
    assert at_end(cut)["optimizer_state"] == 2 * 4
    assert peak(cut, "weights", "backward") == 2 * 4 + 4 * 2
    assert peak(cut, "gradients", "optimizer") == 2 * 4


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_offloaded_parameters_leave_only_what_is_gathered_on_the_device(kind: str) -> None:
    cut = shard(step(), weights(), Sharding(world_size=2, kind=kind, offload="weights")).stream

    assert at_end(cut) == {}
    assert peak(cut, "weights", "forward") == EMBEDDING + MATRIX
    assert not any(place.phase == "optimizer" and num >= 0 for num, place in zip(cut.storages, cut.places, strict=True))


def test_an_offloaded_optimizer_leaves_weights_and_gradients() -> None:
    cut = shard(step(), weights(), Sharding(world_size=2, offload="optimizer")).stream

    assert at_end(cut) == {"weights": (EMBEDDING + LAYERS * MATRIX) // 2}
    assert peak(cut, "gradients", "backward") == EMBEDDING + 2 * MATRIX // 2 + MATRIX


def test_one_rank_of_fsdp2_has_no_buffer_to_gather_into() -> None:
    plain = step(trainable=False)
    cut = shard(plain, weights(trainable=False), Sharding(world_size=1)).stream

    assert peak(cut, "temporary", "forward") == 0
    assert peak(cut, "weights", "forward") == peak(plain, "weights", "load") + EMBEDDING + MATRIX


def test_storages_that_are_no_parameters_are_whole_on_every_rank() -> None:
    stream = EventStream()
    stream.birth(100, "weights", LOAD)

    assert at_end(shard(stream, [], Sharding(world_size=4)).stream) == {"weights": 100}


def test_gradients_of_what_is_not_cut_stay_whole() -> None:
    root, *layers = weights()

    cut = shard(step(), [root], Sharding(world_size=2, kind="fsdp1")).stream

    assert peak(cut, "gradients", "backward") == LAYERS * MATRIX + EMBEDDING + EMBEDDING // 2
    assert at_end(cut)["weights"] == EMBEDDING // 2 + sum(4 * layer.elements for layer in layers)


def test_later_micro_batches_add_to_the_shards_that_are_there() -> None:
    stream = EventStream()
    stream.birth(MATRIX, "weights", Place("load", 0))
    weight = Weight(storage=0, shape=(20, 10), element_bytes=4, layer=0, trainable=True)
    first = stream.birth(MATRIX, "gradients", Place("backward", 0))
    stream.mark("next")
    stream.birth(HIDDEN, "temporary", Place("forward", 0))
    second = stream.birth(MATRIX, "temporary", Place("backward", 0))
    stream.death(second, Place("backward", 0, "", "aten::add_"))
    stream.mark("update")
    stream.death(first, OPTIMIZER)

    cut = shard(stream, [weight], Sharding(world_size=2)).stream

    assert [now["gradients"] for place, now in live(cut) if place.operator == "fsdp::accumulate"] == [MATRIX // 2]
    assert peak(cut, "gradients", "backward") == MATRIX  # two shards, before they are added
    assert at_end(cut) == {"weights": MATRIX // 2, "temporary": HIDDEN}


def test_hooks_of_fsdp1_keep_inputs_of_frozen_units_and_their_gradients() -> None:
    frozen = weights(trainable=False)
    reentrant = Sharding(world_size=2, kind="fsdp1", reentrant_checkpoints=True)

    kept = shard(step(trainable=False), frozen, reentrant).stream
    plain = shard(step(trainable=False), frozen, Sharding(world_size=2, kind="fsdp1", prefetch=False)).stream

    def in_layer_0(stream: EventStream) -> dict[Category, int]:
        return [now for place, now in live(stream) if place == Place("backward", 0)][-1]

    # inputs of three layers in place of none; one gradient more: those that layers 2 and 1 gave, and layer 0's own
    assert in_layer_0(kept)["activations"] - in_layer_0(plain)["activations"] == LAYERS * HIDDEN
    assert in_layer_0(kept)["temporary"] - in_layer_0(plain)["temporary"] == (LAYERS - 1) * HIDDEN
    assert at_end(kept) == at_end(plain)


def test_adapters_are_units_of_their_own_in_fsdp1() -> None:
    stream = EventStream()
    stream.birth(80, "weights", Place("load", 0))
    stream.birth(12, "weights", Place("load", 0))
    stream.birth(4, "temporary", Place("forward", 0))
    base = Weight(storage=0, shape=(40,), element_bytes=2, layer=0, trainable=False)
    adapter = Weight(storage=1, shape=(3,), element_bytes=4, layer=0, trainable=True)

    cut = shard(stream, [base, adapter], Sharding(world_size=2, kind="fsdp1")).stream

    assert at_end(cut)["weights"] == 40 + 8  # half of 40 × 2, half of 3 × 4 rounded up to 2 elements
    assert peak(cut, "weights", "forward") == 40 + 8 + 80 + 16


def test_without_cuts_only_the_optimizer_leaves_the_device() -> None:
    plain = step()
    assert shard(plain, weights(), Sharding(world_size=1, kind="whole")).stream is plain

    cut = shard(step(), weights(), Sharding(world_size=1, kind="whole", offload="optimizer")).stream
    assert at_end(cut) == {"weights": EMBEDDING + LAYERS * MATRIX}
    assert peak(cut, "gradients", "backward") == EMBEDDING + LAYERS * MATRIX


def adapted() -> tuple[EventStream, list[Weight]]:
    """A step of two layers, each with two adapters, up to the backward pass of layer 0."""
    stream = EventStream()
    found = []
    for layer in range(2):
        for name, trainable in (("base", False), ("first", True), ("second", True)):
            storage = stream.birth(80, "weights", Place("load", layer, name))
            found.append(Weight(storage=storage, shape=(40,), element_bytes=2, layer=layer, trainable=trainable))
    for layer in range(2):
        stream.birth(HIDDEN, "activations", Place("forward", layer))
    for layer in (1, 0):
        for name in ("first", "second", "second", "first", "base"):  # recomputed, then the gradients
            stream.birth(HIDDEN, "temporary", Place("backward", layer, name))
    return stream, found


def test_with_adapters_fsdp1_gathers_a_layer_when_the_one_after_it_is_nearly_over() -> None:
    stream, found = adapted()
    rank = shard(stream, found, Sharding(world_size=2, kind="fsdp1")).stream

    backward = [
        (place.layer, rank.sizes[storage])
        for storage, place in zip(rank.storages, rank.places, strict=True)
        if storage >= 0 and place.phase == "backward"
    ]

    next_whole = [(1, 80)] * 2  # layer 0 and its last adapter, gathered while layer 1 is at its first adapter
    activations = [(1, HIDDEN)]
    start = backward.index((1, HIDDEN))
    assert backward[start : start + 7] == activations * 3 + next_whole + activations * 2
    assert backward[:start] == [(None, 80)] * 2  # the last layer, gathered with the root


def test_reentrant_checkpoints_around_units_leave_nothing_to_prefetch() -> None:
    stream, found = adapted()
    rank = shard(stream, found, Sharding(world_size=2, kind="fsdp1", reentrant_checkpoints=True)).stream

    gathered = [
        place.layer
        for storage, place in zip(rank.storages, rank.places, strict=True)
        if storage >= 0 and place.phase == "backward" and place.operator == "fsdp::all_gather"
    ]
    assert gathered == [1, 1, 0, 0]
