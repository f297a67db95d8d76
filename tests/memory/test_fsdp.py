"""The stream of one rank: by hand, against what fully_shard holds on two processes, and in predictions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

import brim
from brim.errors import InputError
from brim.memory import MemoryPrediction
from brim.memory.events import Category, EventStream, Place, Weight
from brim.memory.fsdp import Sharding, shard
from brim.memory.fsdp.units import Precision
from brim.memory.trace.recorder import Recorder

LAYERS = 3
EMBEDDING, MATRIX, HIDDEN = 1200, 800, 40  # bytes of the root's weight, of a layer's weight, of an activation
WHOLE = EMBEDDING + LAYERS * MATRIX
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


def cut(**settings: Any) -> EventStream:
    """That step on one of two ranks."""
    return shard(step(), weights(), Sharding(**{"world_size": 2, **settings})).stream


def live(stream: EventStream) -> Iterator[tuple[Place, dict[Category, int]]]:
    """Live bytes by category after each event; every storage is born before it dies, and dies once."""
    now: dict[Category, int] = {}
    alive: set[int] = set()
    for storage, place in zip(stream.storages, stream.places, strict=True):
        which = storage if storage >= 0 else ~storage
        if storage >= 0:
            assert storage not in alive
            alive.add(storage)
        else:
            alive.remove(which)
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
def test_shards_of_weights_and_optimizer_sum_to_the_whole(kind: Any, world_size: int) -> None:
    rank = shard(step(), weights(), Sharding(world_size=world_size, kind=kind))
    end = at_end(rank.stream)
    assert world_size * end["weights"] == WHOLE
    assert end["optimizer_state"] == 2 * end["weights"]
    assert not {"temporary", "activations"} & end.keys()
    assert len(rank.cuda_streams) == len(rank.stream.sizes)


def test_shards_that_do_not_divide_are_padded_by_rows_in_fsdp2_and_as_one_in_fsdp1() -> None:
    end = at_end(shard(step(), weights(rows=25), Sharding(world_size=8)).stream)
    assert end["weights"] == 8 * 5 * 4 + LAYERS * 4 * 8 * 4  # ceil(60 / 8) rows of 5, ceil(25 / 8) rows of 8

    one = Weight(storage=0, shape=(3,), element_bytes=2, layer=None, trainable=False)
    two = Weight(storage=1, shape=(5,), element_bytes=2, layer=None, trainable=False)
    stream = EventStream()
    stream.birth(6, "weights", LOAD)
    stream.birth(10, "weights", LOAD)
    end = at_end(shard(stream, [one, two], Sharding(world_size=2, kind="fsdp1")).stream)
    assert end == {"weights": 2 * 7}  # 3, padded to 8 since each begins at 16 bytes, and 5: 13, half of it rounded up


def test_one_layer_and_the_buffer_of_its_forerunner_are_whole_in_the_forward_pass() -> None:
    assert peak(cut(), "weights", "forward") == WHOLE // 2 + EMBEDDING + MATRIX
    assert peak(cut(), "temporary", "forward") == EMBEDDING + MATRIX  # the root's buffer beside the first layer's
    # One rank has no buffer to gather into.
    plain = step(trainable=False)
    alone = shard(plain, weights(trainable=False), Sharding(world_size=1)).stream
    assert peak(alone, "temporary", "forward") == 0
    assert peak(alone, "weights", "forward") == peak(plain, "weights", "load") + EMBEDDING + MATRIX


def test_the_backward_pass_of_fsdp2_prefetches_and_cuts_gradients_through_a_buffer() -> None:
    def at_layer_1(stream: EventStream) -> dict[Category, int]:
        place = Place("backward", 1, "", "fsdp::reduce_scatter")
        return [now for where, now in live(stream) if where == place][-1]

    # the buffers: layer 0 prefetched, layer 1's gradients on their way; the layer's input gradient
    assert at_layer_1(cut())["temporary"] == MATRIX + MATRIX + HIDDEN
    assert at_layer_1(cut(prefetch=False))["temporary"] == MATRIX + HIDDEN
    # the root's whole gradient, shards of layers 2 and 1
    assert at_layer_1(cut())["gradients"] == EMBEDDING + 2 * MATRIX // 2
    assert peak(cut(), "gradients", "backward") == EMBEDDING + 2 * MATRIX // 2 + MATRIX


def test_gradients_are_gone_after_the_step_in_fsdp2_and_stay_until_the_next_in_fsdp1() -> None:
    assert "gradients" not in at_end(cut())
    assert at_end(cut(kind="fsdp1"))["gradients"] == WHOLE // 2
    stream = step()
    stream.mark("step 2")
    stream.birth(HIDDEN, "temporary", FORWARD)
    assert "gradients" not in at_end(shard(stream, weights(), Sharding(world_size=2, kind="fsdp1")).stream)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_mixed_precision_keeps_fp32_shards_of_bf16_parameters(kind: Any) -> None:
    stream = EventStream()
    stream.birth(8, "weights", LOAD)
    gradient = stream.birth(8, "gradients", BACKWARD)
    stream.birth(8, "optimizer_state", OPTIMIZER)
    stream.death(gradient, OPTIMIZER)
    weight = Weight(storage=0, shape=(4,), element_bytes=2, layer=None, trainable=True)
    precision = Precision(shard_bytes=4, gathered_bytes=2)
    rank = shard(stream, [weight], Sharding(world_size=2, kind=kind, precision=precision)).stream
    assert (at_end(rank)["weights"], at_end(rank)["optimizer_state"]) == (2 * 4, 2 * 4)
    assert peak(rank, "weights", "backward") == 2 * 4 + 4 * 2
    assert peak(rank, "gradients", "optimizer") == 2 * 4


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_offloaded_parameters_leave_only_what_is_gathered_on_the_device(kind: Any) -> None:
    rank = cut(kind=kind, offload="weights")
    assert at_end(rank) == {}
    assert peak(rank, "weights", "forward") == EMBEDDING + MATRIX
    events = zip(rank.storages, rank.places, strict=True)
    assert not any(place.phase == "optimizer" and storage >= 0 for storage, place in events)


def test_an_offloaded_optimizer_leaves_weights_and_gradients() -> None:
    rank = cut(offload="optimizer")
    assert at_end(rank) == {"weights": WHOLE // 2}
    assert peak(rank, "gradients", "backward") == EMBEDDING + 2 * MATRIX // 2 + MATRIX
    alone = cut(world_size=1, kind="whole", offload="optimizer")
    assert at_end(alone) == {"weights": WHOLE}
    assert peak(alone, "gradients", "backward") == WHOLE
    plain = step()
    assert shard(plain, weights(), Sharding(world_size=1, kind="whole")).stream is plain


def test_what_is_no_parameter_or_not_cut_is_whole_on_every_rank() -> None:
    stream = EventStream()
    stream.birth(100, "weights", LOAD)
    assert at_end(shard(stream, [], Sharding(world_size=4)).stream) == {"weights": 100}

    root, *layers = weights()
    rank = shard(step(), [root], Sharding(world_size=2, kind="fsdp1")).stream
    assert peak(rank, "gradients", "backward") == WHOLE + EMBEDDING // 2
    assert at_end(rank)["weights"] == EMBEDDING // 2 + sum(4 * layer.elements for layer in layers)


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
    rank = shard(stream, [weight], Sharding(world_size=2)).stream
    assert [now["gradients"] for place, now in live(rank) if place.operator == "fsdp::accumulate"] == [MATRIX // 2]
    assert peak(rank, "gradients", "backward") == MATRIX  # two shards, before they are added
    assert at_end(rank) == {"weights": MATRIX // 2, "temporary": HIDDEN}


def test_hooks_of_fsdp1_keep_inputs_of_frozen_units_and_their_gradients() -> None:
    def frozen(**settings: Any) -> EventStream:
        sharding = Sharding(world_size=2, kind="fsdp1", **settings)
        return shard(step(trainable=False), weights(trainable=False), sharding).stream

    def in_layer_0(stream: EventStream) -> dict[Category, int]:
        return [now for place, now in live(stream) if place == Place("backward", 0)][-1]

    kept, plain = frozen(reentrant_checkpoints=True), frozen(prefetch=False)
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
    rank = shard(stream, [base, adapter], Sharding(world_size=2, kind="fsdp1")).stream
    assert at_end(rank)["weights"] == 40 + 8  # half of 40 × 2, half of 3 × 4 rounded up to 2 elements
    assert peak(rank, "weights", "forward") == 40 + 8 + 80 + 16


def test_with_adapters_fsdp1_gathers_a_layer_when_the_one_after_it_is_nearly_over() -> None:
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

    def backward(**settings: Any) -> list[tuple[Place, int]]:
        rank = shard(stream, found, Sharding(world_size=2, kind="fsdp1", **settings)).stream
        events = zip(rank.storages, rank.places, strict=True)
        return [(place, rank.sizes[each]) for each, place in events if each >= 0 and place.phase == "backward"]

    births = [(place.layer, size) for place, size in backward()]
    next_whole = [(1, 80)] * 2  # layer 0 and its last adapter, gathered while layer 1 is at its first adapter
    activations = [(1, HIDDEN)]
    start = births.index((1, HIDDEN))
    assert births[start : start + 7] == activations * 3 + next_whole + activations * 2
    assert births[:start] == [(None, 80)] * 2  # the last layer, gathered with the root
    # Reentrant checkpoints around units leave nothing to prefetch.
    gathered = [
        place.layer for place, _ in backward(reentrant_checkpoints=True) if place.operator == "fsdp::all_gather"
    ]
    assert gathered == [1, 1, 0, 0]


# Against what fully_shard really holds: two processes, gloo, on the CPU

WORLD_SIZE, WIDTH, VOCABULARY = 2, 64, 511  # of odd rows: shards of the embedding and the head are padded
TOKENS = (2, 8)
STEPS = 3  # the least of them counts: gloo's own threads let go of a buffer a moment later now and then


class Layer(nn.Module):
    """A residual MLP with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.silu(self.up(hidden)))


class Model(nn.Module):
    """An embedding, four layers, a head, a loss."""

    def __init__(self, *, checkpointed: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._checkpointed = checkpointed
        if frozen:  # what an adapter leaves: one small trained weight a layer
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self._checkpointed else layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class LiveBytes(TorchDispatchMode):
    """The most bytes that plain storages had after any operator, by phase; freed and resized ones included."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.phase = "forward"
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._see(parameters)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(args, kwargs, out)
        storages = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        now = sum(storage.nbytes() for storage in storages)
        self.peaks[self.phase] = max(now, self.peaks.get(self.phase, 0))
        return out

    def _see(self, *values: Any) -> None:
        for each in tree_leaves(values):
            if type(each) in (Tensor, nn.Parameter):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)


def measure(case: dict[str, Any]) -> dict[str, int]:
    """On each rank: peaks of the last micro-batch's passes, and bytes of what is there after the optimizer."""
    model = Model(checkpointed=case["checkpointed"], frozen=case["frozen"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.zeros(TOKENS, dtype=torch.long)).backward()  # the first step also sets up
    parameters = list(model.parameters())
    steps = [_peaks_of_step(model, parameters, case["micro_batches"]) for _ in range(STEPS)]
    peaks = {phase: min(step[phase] for step in steps) for phase in steps[0]}
    optimizer = torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad])
    optimizer.step()
    states = [state for each in optimizer.state.values() for state in each.values() if isinstance(state, DTensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = {"weights": parameters, "gradients": gradients, "optimizer_state": states}
    return {**peaks, **{category: _storage_bytes(tensors) for category, tensors in held.items()}}


def _peaks_of_step(model: Model, parameters: list[nn.Parameter], micro_batches: int) -> dict[str, int]:
    model.zero_grad()
    for _ in range(micro_batches - 1):
        model(torch.zeros(TOKENS, dtype=torch.long)).backward()
    gc.collect()
    held = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    with LiveBytes([_local(tensor) for tensor in held]) as live_bytes:
        loss = model(torch.zeros(TOKENS, dtype=torch.long))
        live_bytes.phase = "backward"
        loss.backward()
    return live_bytes.peaks


def _storage_bytes(tensors: list[Any]) -> int:
    storages = {storage.data_ptr(): storage.nbytes() for storage in (_local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def predict(*, checkpointed: bool, frozen: bool, micro_batches: int) -> dict[str, int]:
    """The same from a recording of one process, without ranks."""
    recorder = Recorder()
    with FakeTensorMode() as mode:
        model = Model(checkpointed=checkpointed, frozen=frozen)
    recorder.know(model, model.layers)
    with mode, recorder, recorder.watching_modules():
        recorder.phase = "load"
        recorder.enter_weights(model)
        for _ in range(micro_batches):
            recorder.phase = "forward"
            recorder.stream.mark("micro-batch")
            loss = model(torch.zeros(TOKENS, dtype=torch.long))
            recorder.phase = "backward"
            loss.backward()
            del loss
            found = [_weight(recorder, name, parameter) for name, parameter in model.named_parameters()]
    stream = recorder.close()
    for _ in range(2):
        for weight in found:
            if weight.trainable:
                stream.birth(4 * weight.elements, "optimizer_state", Place("optimizer"))
    rank = shard(stream, found, Sharding(world_size=WORLD_SIZE)).stream
    figures, last = {"forward": 0, "backward": 0}, rank.marks[-1][0]
    for position, (place, now) in enumerate(live(rank)):
        if place.phase in figures and position >= last:
            figures[place.phase] = max(sum(now.values()), figures[place.phase])
    return {**figures, **{category: now[category] for category in ("weights", "gradients", "optimizer_state")}}


def _weight(recorder: Recorder, name: str, parameter: nn.Parameter) -> Weight:
    if parameter.grad is not None:
        recorder.categorize(parameter.grad, "gradients")
    storage = recorder.number_of(parameter)
    assert storage is not None
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    shape, trainable = tuple(parameter.shape), parameter.requires_grad
    return Weight(storage=storage, shape=shape, element_bytes=4, layer=layer, trainable=trainable)


CASES = [
    {"checkpointed": False, "frozen": False, "micro_batches": 1},
    {"checkpointed": True, "frozen": False, "micro_batches": 1},
    {"checkpointed": True, "frozen": True, "micro_batches": 1},
    {"checkpointed": True, "frozen": False, "micro_batches": 2},
]


@contextmanager
def _group(folder: str, rank: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _other_rank(folder: str) -> None:
    with _group(folder, 1):
        for case in CASES:
            measure(case)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_rank_holds_what_is_predicted_to_the_byte(tmp_path: Path) -> None:
    other = mp.get_context("spawn").Process(target=_other_rank, args=(str(tmp_path),))
    other.start()
    with _group(str(tmp_path), 0):
        measured = [measure(case) for case in CASES]
    other.join()
    assert other.exitcode == 0
    for case, figures in zip(CASES, measured, strict=True):
        assert predict(**case) == figures, case


# `predict_memory` over several GPUs, and with what is offloaded to the CPU

SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 4096, "intermediate_size": 2048}
LAYER_PARAMETERS = 4 * 512**2 + 3 * 512 * 2048 + 2 * 512
PARAMETERS = 4 * LAYER_PARAMETERS + 2 * 4096 * 512 + 512


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json and no weights."""
    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(
        architectures=["LlamaForCausalLM"], num_attention_heads=8, max_position_embeddings=512, dtype="float32", **SIZES
    ).save_pretrained(folder)
    return folder


def predicted(base: Path, **options: Any) -> MemoryPrediction:
    config = {
        "base_model": str(base),
        "prompt": {"template": "{question}"},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune", "batch_size": 1},
    }
    return brim.predict_memory(config, batch_size=1, sequence_length=64, device="a100-80gb", **options)


def test_a_rank_ends_a_step_with_its_part_and_what_is_on_the_cpu_takes_nothing_on_the_gpu(base: Path) -> None:
    alone = predicted(base)
    assert not any(choice.startswith(("sharding", "offload")) for choice in alone.choices)

    rank = predicted(base, world_size=4)
    gone = alone.end_allocated_bytes - rank.end_allocated_bytes
    assert gone == pytest.approx(3 * 4 * PARAMETERS * 3 / 4, rel=0.001)  # blocks are of 512 bytes
    assert rank.world_size == 4
    assert any(choice.startswith("sharding: over 4 GPUs") for choice in rank.choices)

    without = predicted(base, offload="optimizer")
    assert without.by_category["optimizer_state"] == 0
    assert alone.end_allocated_bytes - without.end_allocated_bytes == pytest.approx(2 * 4 * PARAMETERS, rel=0.001)
    assert any(choice.startswith("offload: optimizer") for choice in without.choices)

    by_layers = predicted(base, offload="weights")
    assert by_layers.end_allocated_bytes < 20 * 2**20  # cuBLAS' workspaces
    assert 4 * LAYER_PARAMETERS < by_layers.by_category["weights"] < 4 * PARAMETERS
    assert by_layers.by_category["optimizer_state"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"offload": "params"}, "offload is 'params'"), ({"world_size": 0}, "world_size is 0")],
)
def test_what_is_no_choice_is_said(base: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(base, **options)
