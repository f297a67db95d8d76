"""What `fully_shard` (FSDP2) allocates and frees around a unit: a decoder layer, or the root that holds the rest.

Read from torch.distributed.fsdp._fully_shard (_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brim.memory.sharding_tape import GATHER, REDUCE, Tape
from brim.memory.sharding_units import Precision, Weight, shard_elements


class FullyShard:
    """Parameters that are cut one by one, gathered through one buffer a unit."""

    def __init__(
        self,
        tape: Tape,
        units: Mapping[int | None, Sequence[Weight]],
        *,
        world_size: int,
        precision: Precision,
        offload: bool,
    ) -> None:
        self._tape, self._units, self._world_size = tape, units, world_size
        self._precision, self._offload = precision, offload
        self._whole: dict[int | None, list[int]] = {}
        self._buffers: dict[int | None, int] = {}  # gathered, not yet copied out
        self._last_buffer: list[int] = []  # of the forward pass: freed after the next one was copied out
        self._reduced: list[int] = []  # the input of the last reduction, kept until the next one

    def shard(self, weight: Weight) -> int:
        """Bytes that the rank keeps of a parameter."""
        return shard_elements(weight.shape, self._world_size) * self._precision.in_shards(weight)

    def gather(self, layer: int | None, *, backward: bool) -> None:
        """Make the unit's parameters whole before its forward or its backward pass."""
        if layer in self._whole:
            return
        self.prefetch(layer)
        self._whole[layer] = [
            self._tape.allocate(self._gathered(weight), "weights", "all_gather_copy_out")
            for weight in self._units.get(layer, ())
        ]
        buffer = [self._buffers.pop(layer)] if layer in self._buffers else []
        if backward:
            self._tape.free(buffer, "all_gather_copy_out")
        else:
            self._free_last_buffer()
            self._last_buffer = buffer

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
        """Drop the whole parameters, cut their gradients; the storages that hold the sharded ones."""
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
        """The root's forward is over."""
        self._free_last_buffer()

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._tape.free(self._reduced, "end_backward")
        self._tape.free(self._buffers.values(), "end_backward")
        self._reduced, self._buffers = [], {}

    def _gathered(self, weight: Weight) -> int:
        padded = shard_elements(weight.shape, self._world_size) * self._world_size
        return padded * self._precision.gathered(weight)

    def _copies(self, layer: int | None) -> list[int]:
        """Shards brought from the CPU, or cast, for as long as they are written into the buffer."""
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
