"""Shard a model over the ranks with FSDP2: each holds its part of the weights, of their gradients and their states.

Before a decoder layer computes, the ranks gather its weights, and drop them again behind it. So all ranks go through
the model together: as often in each step, and a rank that has nothing left to do runs a dummy. The gradients of a round
are added up at once, each to the rank that holds its weight. They could wait for the step's end, whole on each rank;
but a round gathers all weights twice, beside which to reduce the gradients of those that train takes little.

Weights may lie on the host, with their gradients and states (memory.offload). Then each rank, or the only one, copies
its part of a layer to the device before it gathers it, and gradients back; the optimizer steps on the host.

Weights are gathered in the dtype in which they are kept, and brim's autocast computes as it does on one GPU: the units
and their dtypes are those that memory/fsdp predicts. Gradients are summed: what they are divided by, the loop knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from brim.batching.memory import is_out_of_memory
from brim.config.schema import Config
from brim.distributed.ranks import Ranks
from brim.errors import ConfigError, OutOfMemoryError
from brim.models.loss import base_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Sharded:
    """Run a model's passes, whose weights this object has sharded: the model's own parameters are shards from then on.

    mesh: of the ranks. The weights may still be on the host; a unit at a time goes to the mesh's device, and is cut.
    parts: of weights that are cut already (`part_of`), which the model has on meta, so that FSDP sees them whole.
    offloads: the parts go back to the host, and stay there.
    Raises ConfigError where the model has no decoder layers that could be units.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        parts: Mapping[tuple[nn.Module, str], Tensor],
        offloads: bool = False,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        is_cuda = mesh.device_type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=is_cuda) if offloads else OffloadPolicy()
        self._ranks, self.offloads = ranks, offloads
        self.is_beside_device = offloads and is_cuda  # a CPU has no other memory
        layers = decoder_layers(model)
        in_layers, self.whole_bytes = [_num_bytes(layer) for layer in layers], _num_bytes(model)
        # What a forward pass holds of whole weights: those of no layer, one layer, and the next in its buffer.
        self.gathered_bytes = self.whole_bytes - sum(in_layers) + 2 * max(in_layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        self._root = _Root(model)
        fully_shard(self._root, mesh=mesh, offload_policy=policy)
        for (layer, name), part in parts.items():
            weight: Any = nn.Parameter(like(part, layer.get_parameter(name)), requires_grad=False)
            weight.quant_state = getattr(layer, "quant_state", None)  # by which elements are counted
            layer.register_parameter(name, weight)
        for module in self._root.modules():
            if isinstance(module, FSDPModule) and ranks.are_several:  # alone, to divide takes a copy of the gradients
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # else by a factor of 1, which gloo does not know
        self._going = torch.zeros((), device=mesh.device_type)

    def __call__(self, work: Callable[[], T]) -> T:
        """Run a forward pass of the model, or of its parts. A tensor that it returns has the pass backward behind it.

        Raises OutOfMemoryError: the rank has left the others in the midst of a pass, so that it cannot try again.
        """
        with self.in_step():
            done: T = self._root(work)
            return done

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Turn an allocation that fails into OutOfMemoryError, which nobody retries; a lone process may try again."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reset: Callable[[], None] | None = getattr(self._root, "reset_iter_state", None)  # older PyTorch has none
            if reset is not None and not self._ranks.are_several:
                for weight in self._root.parameters():  # FSDP keeps gradients of whole weights that it has not reduced
                    weight.grad = None
                reset()
                raise
            message = str(error).splitlines()[0]
            raise OutOfMemoryError(
                what=f"memory ran out on rank {self._ranks.rank} in the midst of a pass that all ranks make together: "
                f"{message}",
                fix="continue with --resume",
            ) from None

    def beside_others(self, work: Callable[[], T]) -> T:
        """Run a pass that not all ranks may have: those that have none left are in `attend`."""
        self._is_anyone_going(goes=True)
        return self(work)

    def attend(self, work: Callable[[], object]) -> None:
        """Do work of one pass for each that others still have (`beside_others`), until all are here."""
        while self._is_anyone_going(goes=False):
            work()

    def _is_anyone_going(self, *, goes: bool) -> bool:
        self._ranks.add(self._going.fill_(goes))
        return bool(self._going.item())


def mesh_of(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the ranks as FSDP knows them. All come here."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (ranks.size,))


def part_of(tensor: Tensor, ranks: Ranks, *, at: torch.device | None = None) -> Tensor:
    """Return a copy of the rows that are this rank's, as torch.chunk cuts them. at: where; None: where the whole is."""
    rows = -(-tensor.shape[0] // ranks.size)
    part = tensor[ranks.rank * rows : (ranks.rank + 1) * rows]
    return part.to(tensor.device if at is None else at, copy=True)


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


class _Root(nn.Module):
    """Hold the weights of no layer, around whatever is called of the model, which may be its parts one by one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return a language model's decoder layers. Raises ConfigError where they are not found."""
    architecture = base_model(model)
    num_layers = getattr(architecture.config.get_text_config(), "num_hidden_layers", None)
    for module in architecture.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ConfigError(
        what=f"{type(architecture).__name__} has no list of {num_layers} decoder layers, which could be sharded",
        where="backend.trainer.strategy",
        fix="set it to ddp",
    )


@dataclass(frozen=True, slots=True)
class Box:
    """Say which part of a whole tensor another one is."""

    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]  # of the part's first element


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor; one process alone never imports what defines them."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: the same memory."""
    return cast("DTensor", tensor).to_local() if is_sharded(tensor) else tensor


def box_of(tensor: Tensor) -> Box:
    """Return where this rank's part lies in the whole: its first dimension is cut as torch.chunk cuts it."""
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Box(shape, (0,) * len(shape))
    mesh = cast("DTensor", tensor).device_mesh
    rows = -(-shape[0] // mesh.size())
    return Box(shape, (min(mesh.get_local_rank() * rows, shape[0]), *(0,) * (len(shape) - 1)))


def like(part: Tensor, model: Tensor) -> Tensor:
    """Return a rank's part of a whole tensor as one that is sharded as another is, of the same shape."""
    from torch.distributed.tensor import DTensor

    if not is_sharded(model):
        return part
    like = cast("DTensor", model)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, which all ranks ask for together. A lone process gets its own, not a copy."""
    if not is_sharded(tensor):
        return tensor
    sharded = cast("DTensor", tensor)
    return sharded.full_tensor() if sharded.device_mesh.size() > 1 else sharded.to_local()


def whole_on_first(ranks: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors one by one; return them on the first rank's host, and nothing in the others."""
    kept = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())
        if ranks.is_first:
            kept[name] = gathered.cpu()
    return kept


_OPTIMIZERS = ("adam", "adamw", "sgd")  # element by element, as shards allow; in torch, which knows their tensors


def sharding_obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what cannot be sharded, its key, and what would do instead."""
    trainer = config.finetune_trainer
    if config.memory.offload == "weights" and config.backend.trainer.strategy == "ddp":
        yield "the whole model on each GPU", "backend.trainer.strategy", "set it to auto"
    if config.quantization is not None and config.adapter is not None and config.adapter.use_dora:
        yield "DoRA on a quantised base, whose weights it needs whole", "adapter.use_dora", "set it to false"
    if config.precision == "fp16-mixed":
        yield "a scaled loss", "precision", "set it to bf16-mixed or fp32"
    if trainer.optimizer.type not in _OPTIMIZERS:
        yield trainer.optimizer.type, "trainer.optimizer.type", f"set it to one of {', '.join(_OPTIMIZERS)}"
    if config.backend.trainer.dealing == "claimed":
        yield "micro-batches that are claimed", "backend.trainer.dealing", "set it to planned"
    if trainer.batch_adaptation is not None:
        yield "a batch that grows with the gradient's noise", "trainer.batch_adaptation", "take it out"
    elif trainer.noise_scale_every is not None:
        yield "measuring the gradient's noise", "trainer.noise_scale_every", "take it out"
    if trainer.batch_size == "auto" and trainer.batch_search != "predict":
        yield "a search for the batch size", "trainer.batch_search", "set it to predict"
