"""What `FullyShardedDataParallel` (FSDP1) allocates and frees around a unit: a decoder layer, or the root.

Read from torch.distributed.fsdp (_runtime_utils.py, _flat_param.py) of torch 2.13. brim does not train with it: public
measurements do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brim.memory.sharding_tape import COPY, GATHER, REDUCE, Tape
from brim.memory.sharding_units import FlatParameter, Precision, Weight, flat_parameters


class FlatShards:
    """Parameters that are written into flat ones, which are cut; gathered straight into place."""

    def __init__(
        self,
        tape: Tape,
        units: Mapping[int | None, Sequence[Weight]],
        *,
        world_size: int,
        precision: Precision,
        offload: bool,
    ) -> None:
        self._tape, self._world_size = tape, world_size
        self._precision, self._offload = precision, offload
        self._units = {layer: flat_parameters(weights) for layer, weights in units.items()}
        self._flat = {flat.weights[0].storage: flat for flats in self._units.values() for flat in flats}
        self._whole: dict[int | None, list[int]] = {}
        self._offloaded: list[int] = []  # sharded gradients, copied to the CPU and kept until the pass is over

    def shard(self, weight: Weight) -> int:
        """Bytes that the rank keeps of a parameter: those of its flat one where it is the first in it."""
        flat = self._flat.get(weight.storage)
        if flat is None:
            return 0
        return flat.shard_elements(self._world_size) * self._precision.in_shards(weight)

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
        """Drop the whole parameters, cut their gradients; the storages that hold the sharded ones."""
        trained = [flat for flat in self._units.get(layer, ()) if flat.trainable] if gradients else []
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
        """The root's forward is over."""

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._tape.free(self._offloaded, "end_backward")
        self._offloaded = []

    def _bytes(self, flat: FlatParameter, shards: int) -> int:
        """Bytes of some shards as they are gathered and reduced."""
        return shards * flat.shard_elements(self._world_size) * self._precision.gathered(flat.weights[0])

    def _all_gather(self, flat: FlatParameter) -> int:
        """From a copy of the shard where it is on the CPU or wider than what is gathered."""
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
