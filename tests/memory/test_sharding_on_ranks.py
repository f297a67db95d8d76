"""The stream of one rank against what `fully_shard` really holds: two processes, gloo, on the CPU."""

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
from torch.utils.checkpoint import checkpoint

from brim.memory.fsdp import Sharding, shard
from brim.memory.trace import Place, Weight
from brim.memory.trace.recorder import Recorder

WORLD_SIZE, HIDDEN, VOCABULARY = 2, 64, 511  # of odd rows: shards of the embedding and the head are padded
TOKENS = (2, 8)
STEPS = 3  # the least of them counts: gloo's own threads let go of a buffer a moment later now and then


class Layer(nn.Module):
    """A residual MLP with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.silu(self.up(hidden)))


class Model(nn.Module):
    """An embedding, four layers, a head, a loss."""

    def __init__(self, *, checkpointed: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
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
        self._see((args, kwargs, out))
        storages = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        now = sum(storage.nbytes() for storage in storages)
        self.peaks[self.phase] = max(now, self.peaks.get(self.phase, 0))
        return out

    def _see(self, value: Any) -> None:
        if type(value) in (Tensor, nn.Parameter):
            storage = value.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)
        elif isinstance(value, (tuple, list)):
            for each in value:
                self._see(each)
        elif isinstance(value, dict):
            self._see(list(value.values()))


def measure(model: Model, *, micro_batches: int) -> dict[str, int]:
    """On each rank: peaks of the last micro-batch's passes, and bytes of what is there after the optimizer."""
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
    return {
        **peaks,
        "weights": _storage_bytes(parameters),
        "gradients": _storage_bytes(gradients),
        "optimizer_state": _storage_bytes(states),
    }


def _peaks_of_step(model: Model, parameters: list[nn.Parameter], micro_batches: int) -> dict[str, int]:
    model.zero_grad()
    for _ in range(micro_batches - 1):
        model(torch.zeros(TOKENS, dtype=torch.long)).backward()
    gc.collect()
    held = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    with LiveBytes([_local(tensor) for tensor in held]) as live:
        loss = model(torch.zeros(TOKENS, dtype=torch.long))
        live.phase = "backward"
        loss.backward()
    return live.peaks


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
            _ = [_weight(recorder, name, parameter) for name, parameter in model.named_parameters()]
        weights = [_weight(recorder, name, parameter) for name, parameter in model.named_parameters()]
    stream = recorder.close()
    trained = [weight for weight in weights if weight.trainable]
    for _ in range(2):
        for weight in trained:
            stream.birth(4 * weight.elements, "optimizer_state", Place("optimizer"))
    rank = shard(stream, weights, Sharding(world_size=WORLD_SIZE)).stream
    now, found = 0, {"forward": 0, "backward": 0}
    last = rank.marks[-1][0]
    for position, (storage, place) in enumerate(zip(rank.storages, rank.places, strict=True)):
        now += rank.sizes[storage] if storage >= 0 else -rank.sizes[~storage]
        if place.phase in found and position >= last:
            found[place.phase] = max(now, found[place.phase])
    alive = set(range(len(rank.sizes))) - {~storage for storage in rank.storages if storage < 0}
    for category in ("weights", "gradients", "optimizer_state"):
        found[category] = sum(rank.sizes[storage] for storage in alive if rank.categories[storage] == category)
    return found


def _weight(recorder: Recorder, name: str, parameter: nn.Parameter) -> Weight:
    if parameter.grad is not None:
        recorder.categorize(parameter.grad, "gradients")
    storage = recorder.number_of(parameter)
    assert storage is not None
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    return Weight(
        storage=storage,
        shape=tuple(parameter.shape),
        element_bytes=4,
        layer=layer,
        trainable=parameter.requires_grad,
    )


CASES = [
    {"checkpointed": False, "frozen": False, "micro_batches": 1},
    {"checkpointed": True, "frozen": False, "micro_batches": 1},
    {"checkpointed": True, "frozen": True, "micro_batches": 1},
    {"checkpointed": True, "frozen": False, "micro_batches": 2},
]


def _measure(case: dict[str, Any]) -> dict[str, int]:
    model = Model(checkpointed=case["checkpointed"], frozen=case["frozen"])
    return measure(model, micro_batches=case["micro_batches"])


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
            _measure(case)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    folder = str(Path(tmp_path_factory.mktemp("ranks")))
    other = mp.get_context("spawn").Process(target=_other_rank, args=(folder,))
    other.start()
    with _group(folder, 0):
        figures = [_measure(case) for case in CASES]
    other.join()
    assert other.exitcode == 0
    return figures


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_rank_holds_what_is_predicted_to_the_byte(number: int, measured: list[dict[str, int]]) -> None:
    case: dict[str, Any] = CASES[number]
    assert predict(**case) == measured[number]
