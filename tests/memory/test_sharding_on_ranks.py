"""Bytes of shards against what `fully_shard` keeps on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from brim.memory.events import EventStream, Place
from brim.memory.sharding import Sharding, shard
from brim.memory.sharding_units import Weight

WORLD_SIZE = 2


class Model(nn.Module):
    """An embedding of an odd number of rows, two layers with a bias of odd length, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.wide = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.wide(hidden).sum()


def _run_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(3, dtype=torch.long)).backward()
    optimizer.step()
    parameters = list(model.parameters())
    gradients = {_storage(parameter.grad) for parameter in parameters}
    states = [state for each in optimizer.state.values() for state in each.values() if isinstance(state, DTensor)]
    figures = {
        "weights": sum(_storage(parameter)[1] for parameter in parameters),
        "gradients": sum(num_bytes for _, num_bytes in gradients),
        "optimizer_state": sum(_storage(state)[1] for state in states),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _storage(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Address and bytes of what a rank holds of a tensor."""
    assert isinstance(tensor, DTensor)
    storage = tensor.to_local().untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _predicted() -> dict[str, int]:
    """The same step as a stream, up to the optimizer's end."""
    stream, weights, gradients = EventStream(), [], []
    layer_of = {"layers.0": 0, "layers.1": 1}
    parameters = list(Model().named_parameters())
    for name, parameter in parameters:
        layer = layer_of.get(name.rpartition(".")[0])
        storage = stream.birth(parameter.nbytes, "weights", Place("load", layer))
        weights.append(
            Weight(storage=storage, shape=tuple(parameter.shape), element_bytes=4, layer=layer, trainable=True)
        )
    for weight in reversed(weights):
        gradients.append(stream.birth(4 * weight.elements, "gradients", Place("backward", weight.layer)))
    for _ in range(2):
        for weight in weights:
            stream.birth(4 * weight.elements, "optimizer_state", Place("optimizer"))
    rank = shard(stream, weights, Sharding(world_size=WORLD_SIZE)).stream
    alive = set(range(len(rank.sizes))) - {~storage for storage in rank.storages if storage < 0}
    totals: dict[str, int] = {}
    for storage in alive:
        category = rank.categories[storage]
        totals[category] = totals.get(category, 0) + rank.sizes[storage]
    return totals


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_shards_of_a_rank_are_those_of_fully_shard(tmp_path: Path) -> None:
    mp.spawn(_run_rank, args=(str(tmp_path),), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
    measured = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]

    assert measured[0] == _predicted()
