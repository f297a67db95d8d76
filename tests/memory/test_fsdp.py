"""The stream of one rank: by hand, against what fully_shard holds on two processes, and in predictions."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import training
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import brim
from brim.memory.events import EventStream, Place, Weight, depth_of
from brim.memory.fsdp import Sharding, shard
from brim.memory.fsdp.units import Precision
from brim.memory.trace.layers import Expansion
from brim.memory.trace.recorder import Recorder
from brim.memory.trace.recording import weights_of

LAYERS = 3
EMBEDDING, MATRIX, HIDDEN = 1200, 800, 40  # bytes of the root's weight, of a layer's weight, of an activation
WHOLE = EMBEDDING + LAYERS * MATRIX
LOAD, FORWARD, BACKWARD, OPTIMIZER = (Place(phase) for phase in ("load", "forward", "backward", "optimizer"))


def weights(*, trainable=True, rows=20):
    """Storage 0 is the root's, 1 to LAYERS the layers'; 4 bytes an element."""
    root = Weight(storage=0, shape=(60, 5), element_bytes=4, layer=None, trainable=trainable)
    shape = (rows, MATRIX // 4 // rows)
    return [root, *(replace(root, storage=1 + layer, shape=shape, layer=layer) for layer in range(LAYERS))]


def step(*, trainable=True):
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


def cut(stream=None, found=None, **settings):
    """That step, or another stream, on one of two ranks."""
    sharding = Sharding(**{"world_size": 2, **settings})
    return shard(stream or step(), weights() if found is None else found, sharding).stream


def loaded(*sizes):
    """A stream that begins with the births of weights."""
    stream = EventStream()
    for size in sizes:
        stream.birth(size, "weights", LOAD)
    return stream


def live(stream):
    """Live bytes by category after each event; every storage is born before it dies, and dies once."""
    now, alive = Counter(), set()
    for storage, place in zip(stream.storages, stream.places, strict=True):
        is_birth = storage >= 0
        which = storage if is_birth else ~storage
        assert (which in alive) != is_birth
        alive ^= {which}
        now[stream.categories[which]] += stream.sizes[which] if is_birth else -stream.sizes[which]
        yield place, dict(now)


def peak(stream, category, phase):
    return max(now.get(category, 0) for place, now in live(stream) if place.phase == phase)


def at_end(stream):
    return {category: num_bytes for category, num_bytes in list(live(stream))[-1][1].items() if num_bytes}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_shards_of_weights_and_optimizer_sum_to_the_whole(kind, world_size):
    rank = shard(step(), weights(), Sharding(world_size=world_size, kind=kind))
    end = at_end(rank.stream)
    assert world_size * end["weights"] == WHOLE
    assert end["optimizer_state"] == 2 * end["weights"]
    assert not {"temporary", "activations"} & end.keys()
    assert len(rank.cuda_streams) == len(rank.stream.sizes)


def test_shards_that_do_not_divide_are_padded_by_rows_in_fsdp2_and_as_one_in_fsdp1():
    end = at_end(cut(found=weights(rows=25), world_size=8))
    assert end["weights"] == 8 * 5 * 4 + LAYERS * 4 * 8 * 4  # ceil(60 / 8) rows of 5, ceil(25 / 8) rows of 8

    one = Weight(storage=0, shape=(3,), element_bytes=2, layer=None, trainable=False)
    two = Weight(storage=1, shape=(5,), element_bytes=2, layer=None, trainable=False)
    end = at_end(cut(loaded(6, 10), [one, two], kind="fsdp1"))
    assert end == {"weights": 2 * 7}  # 3, padded to 8 since each begins at 16 bytes, and 5: 13, half of it rounded up


def test_one_rank_has_no_buffer_to_gather_into():
    plain = step(trainable=False)
    alone = cut(plain, weights(trainable=False), world_size=1)
    assert peak(alone, "temporary", "forward") == 0
    assert peak(alone, "weights", "forward") == peak(plain, "weights", "load") + EMBEDDING + MATRIX


def test_gradients_are_gone_after_the_step_in_fsdp2_and_stay_until_the_next_in_fsdp1():
    assert "gradients" not in at_end(cut())
    assert at_end(cut(kind="fsdp1"))["gradients"] == WHOLE // 2
    stream = step()
    stream.mark("step 2")
    stream.birth(HIDDEN, "temporary", FORWARD)
    assert "gradients" not in at_end(cut(stream, kind="fsdp1"))


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_mixed_precision_keeps_fp32_shards_of_bf16_parameters(kind):
    stream = loaded(8)
    gradient = stream.birth(8, "gradients", BACKWARD)
    stream.birth(8, "optimizer_state", OPTIMIZER)
    stream.death(gradient, OPTIMIZER)
    weight = Weight(storage=0, shape=(4,), element_bytes=2, layer=None, trainable=True)
    rank = cut(stream, [weight], kind=kind, precision=Precision(shard_bytes=4, gathered_bytes=2))
    assert (at_end(rank)["weights"], at_end(rank)["optimizer_state"]) == (2 * 4, 2 * 4)
    assert peak(rank, "weights", "backward") == 2 * 4 + 4 * 2
    assert peak(rank, "gradients", "optimizer") == 2 * 4


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_offloaded_parameters_leave_only_what_is_gathered_on_the_device(kind):
    rank = cut(kind=kind, offload="weights")
    assert at_end(rank) == {}
    assert peak(rank, "weights", "forward") == EMBEDDING + MATRIX
    events = zip(rank.storages, rank.places, strict=True)
    assert not any(place.phase == "optimizer" and storage >= 0 for storage, place in events)


def test_an_offloaded_optimizer_leaves_weights_and_gradients():
    rank = cut(offload="optimizer")
    assert at_end(rank) == {"weights": WHOLE // 2}
    assert peak(rank, "gradients", "backward") == EMBEDDING + 2 * MATRIX // 2 + MATRIX
    alone = cut(world_size=1, kind="whole", offload="optimizer")
    assert at_end(alone) == {"weights": WHOLE}
    assert peak(alone, "gradients", "backward") == WHOLE
    plain = step()
    assert cut(plain, world_size=1, kind="whole") is plain


def test_what_is_no_parameter_or_not_cut_is_whole_on_every_rank():
    assert at_end(cut(loaded(100), [])) == {"weights": 100}
    root, *layers = weights()
    rank = cut(found=[root], kind="fsdp1")
    assert peak(rank, "gradients", "backward") == WHOLE + EMBEDDING // 2
    assert at_end(rank)["weights"] == EMBEDDING // 2 + sum(4 * layer.elements for layer in layers)


def test_hooks_of_fsdp1_keep_inputs_of_frozen_units_and_their_gradients():
    def in_layer_0(stream):
        return [now for place, now in live(stream) if place == Place("backward", 0)][-1]

    frozen = (step(trainable=False), weights(trainable=False))
    kept, plain = (cut(*frozen, kind="fsdp1", reentrant_checkpoints=each, prefetch=False) for each in (True, False))
    # inputs of three layers in place of none; one gradient more: those that layers 2 and 1 gave, and layer 0's own
    assert in_layer_0(kept)["activations"] - in_layer_0(plain)["activations"] == LAYERS * HIDDEN
    assert in_layer_0(kept)["temporary"] - in_layer_0(plain)["temporary"] == (LAYERS - 1) * HIDDEN
    assert at_end(kept) == at_end(plain)


def test_adapters_are_units_of_their_own_in_fsdp1():
    stream = loaded(80, 12)
    stream.birth(4, "temporary", Place("forward", 0))
    base = Weight(storage=0, shape=(40,), element_bytes=2, layer=0, trainable=False)
    adapter = Weight(storage=1, shape=(3,), element_bytes=4, layer=0, trainable=True)
    rank = cut(stream, [base, adapter], kind="fsdp1")
    assert at_end(rank)["weights"] == 40 + 8  # half of 40 × 2, half of 3 × 4 rounded up to 2 elements
    assert peak(rank, "weights", "forward") == 40 + 8 + 80 + 16


def test_with_adapters_fsdp1_gathers_a_layer_when_the_one_after_it_is_nearly_over():
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

    def backward(**settings):
        rank = cut(stream, found, kind="fsdp1", **settings)
        events = zip(rank.storages, rank.places, strict=True)
        return [(place, rank.sizes[each]) for each, place in events if each >= 0 and place.phase == "backward"]

    births = [(place.layer, size) for place, size in backward()]
    of_root = [(None, 80)] * 2  # the last layer, gathered with the root
    next_whole = [(1, 80)] * 2  # layer 0 and its last adapter, gathered while layer 1 is at its first adapter
    assert births[:9] == of_root + [(1, HIDDEN)] * 3 + next_whole + [(1, HIDDEN)] * 2
    # Reentrant checkpoints around units leave nothing to prefetch.
    anew = [place for place, _ in backward(reentrant_checkpoints=True)]
    assert [place.layer for place in anew if place.operator == "fsdp::all_gather"] == [1, 1, 0, 0]


# Against what fully_shard really holds: two processes, gloo, on the CPU
WORLD_SIZE, WIDTH, VOCABULARY = 2, 64, 511  # of odd rows: shards of the embedding and the head are padded
TOKENS = (2, 8)
STEPS = 3  # the least of them counts: gloo's own threads let go of a buffer a moment later now and then


class Layer(nn.Module):
    """A residual MLP with a bias."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(F.silu(self.up(hidden)))


class Model(nn.Module):
    """An embedding, four layers, a head, a loss."""

    def __init__(self, *, checkpointed, frozen):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._checkpointed = checkpointed
        if frozen:  # what an adapter leaves: one small trained weight a layer
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self._checkpointed else layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class LiveBytes(TorchDispatchMode):
    """The most bytes that plain storages had after any operator, by phase; freed and resized ones included."""

    def __init__(self, parameters):
        super().__init__()
        self.peaks = {}
        self.phase = "forward"
        self._storages = {}
        self._see(parameters)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._see(args, kwargs, out)
        storages = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        now = sum(storage.nbytes() for storage in storages)
        self.peaks[self.phase] = max(now, self.peaks.get(self.phase, 0))
        return out

    def _see(self, *values):
        for each in tree_leaves(values):
            if type(each) in (Tensor, nn.Parameter):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)


def measure(checkpointed, frozen, micro_batches):
    """On each rank: peaks of the last micro-batch's passes, and bytes of what is there after the optimizer."""
    model = Model(checkpointed=checkpointed, frozen=frozen)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.zeros(TOKENS, dtype=torch.long)).backward()  # the first step also sets up
    parameters = list(model.parameters())
    steps = [_peaks_of_step(model, parameters, micro_batches) for _ in range(STEPS)]
    peaks = {phase: min(step[phase] for step in steps) for phase in steps[0]}
    optimizer = torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad])
    optimizer.step()
    states = [state for each in optimizer.state.values() for state in each.values() if isinstance(state, DTensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = {"weights": parameters, "gradients": gradients, "optimizer_state": states}
    return {**peaks, **{category: _storage_bytes(tensors) for category, tensors in held.items()}}


def _peaks_of_step(model, parameters, micro_batches):
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


def _storage_bytes(tensors):
    storages = {storage.data_ptr(): storage.nbytes() for storage in (_local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def _local(tensor):
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def predict(checkpointed, frozen, micro_batches):
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
            for parameter in model.parameters():
                if parameter.grad is not None:
                    recorder.categorize(parameter.grad, "gradients")
    stream = recorder.close()
    found = weights_of(recorder, model, depth_of([0] * 4), "layers", Expansion(stream, None))
    for _ in range(2):
        for weight in found:
            if weight.trainable:
                stream.birth(4 * weight.elements, "optimizer_state", Place("optimizer"))
    rank = cut(stream, found)
    figures, last = {"forward": 0, "backward": 0}, rank.marks[-1][0]
    for position, (place, now) in enumerate(live(rank)):
        if place.phase in figures and position >= last:
            figures[place.phase] = max(sum(now.values()), figures[place.phase])
    return {**figures, **{category: now[category] for category in ("weights", "gradients", "optimizer_state")}}


CASES = [(False, False, 1), (True, False, 1), (True, True, 1), (True, False, 2)]  # checkpointed, frozen, micro-batches


def _measured(folder, rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    try:
        return [measure(*case) for case in CASES]
    finally:
        dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: other threads, which do nothing in a fork
def test_a_rank_holds_what_is_predicted_to_the_byte(tmp_path):
    # Where there is a GPU, autograd has threads, which no fork survives.
    way = "spawn" if torch.cuda.is_available() else "fork"
    other = mp.get_context(way).Process(target=_measured, args=(str(tmp_path), 1))
    other.start()
    measured = _measured(str(tmp_path), 0)
    other.join()
    assert other.exitcode == 0
    for case, figures in zip(CASES, measured, strict=True):
        assert predict(*case) == figures, case


SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 4096, "intermediate_size": 2048}
SIZES |= {"num_key_value_heads": 4}
LAYER_PARAMETERS = 4 * 512**2 + 3 * 512 * 2048 + 2 * 512
PARAMETERS = 4 * LAYER_PARAMETERS + 2 * 4096 * 512 + 512


def test_a_rank_ends_a_step_with_its_part_and_what_is_on_the_cpu_takes_nothing_on_the_gpu(tmp_path):
    base = write_folder(tmp_path, "llama", dtype="float32", **SIZES)
    config = training(base, enable_gradient_checkpointing=False)  # no question of two predictions
    predicted = partial(brim.predict_memory, config, batch_size=1, sequence_length=64, device="a100-80gb")
    alone = predicted()
    assert not any(choice.startswith(("sharding", "offload")) for choice in alone.choices)

    rank = predicted(world_size=4)
    gone = alone.end_allocated_bytes - rank.end_allocated_bytes
    assert gone == pytest.approx(3 * 4 * PARAMETERS * 3 / 4, rel=0.001)  # blocks are of 512 bytes
    assert rank.world_size == 4
    assert any(choice.startswith("sharding: over 4 GPUs") for choice in rank.choices)

    without = predicted(offload="optimizer")
    assert without.by_category["optimizer_state"] == 0
    assert alone.end_allocated_bytes - without.end_allocated_bytes == pytest.approx(2 * 4 * PARAMETERS, rel=0.001)
    assert any(choice.startswith("offload: optimizer") for choice in without.choices)

    by_layers = predicted(offload="weights")
    assert by_layers.end_allocated_bytes < 20 * 2**20  # cuBLAS' workspaces
    assert 4 * LAYER_PARAMETERS < by_layers.by_category["weights"] < 4 * PARAMETERS
    assert by_layers.by_category["optimizer_state"] == 0
