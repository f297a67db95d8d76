"""How parameters are cut over the ranks of fully sharded data parallelism: bytes of shards and of what is gathered.

FSDP2 (`torch.distributed.fsdp.fully_shard`) cuts each parameter along its first dimension; FSDP1
(`FullyShardedDataParallel`) writes the parameters of a unit into one flat parameter and cuts that. Figures are those of
rank 0, whose shard is never the smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ALIGNMENT_BYTES = 16  # of each parameter in a flat one that keeps its originals: FlatParamHandle._get_aligned_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter as it is stored; a quantised one is its packed storage."""

    storage: int  # its number in the stream
    shape: tuple[int, ...]
    element_bytes: int
    layer: int | None  # the decoder layer that it belongs to; None: outside the layers
    trainable: bool

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of an element where FSDP's mixed precision changes them; None: those of the parameter."""

    shard_bytes: int | None = None  # of trainable parameters, which accelerate keeps in fp32 under mixed precision
    gathered_bytes: int | None = None  # of parameters wider than this, and of the gradients that are reduced

    def in_shards(self, weight: Weight) -> int:
        """Bytes of an element of the sharded parameter and its gradient."""
        if weight.trainable and self.shard_bytes is not None:
            return max(self.shard_bytes, weight.element_bytes)
        return weight.element_bytes

    def gathered(self, weight: Weight) -> int:
        """Bytes of an element of the whole parameter, and of the gradient that is reduced."""
        stored = self.in_shards(weight)
        return stored if self.gathered_bytes is None else min(stored, self.gathered_bytes)


def shard_elements(shape: Sequence[int], world_size: int) -> int:
    """Elements of one padded shard along the first dimension."""
    rows = shape[0] if shape else 1
    return -(-rows // world_size) * math.prod(shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """Parameters of equal storage that FSDP1 writes one after the other."""

    weights: tuple[Weight, ...]

    def shard_elements(self, world_size: int) -> int:
        """Elements of one shard: each parameter begins at 16 bytes, the end is padded to the ranks."""
        elements = 0
        for weight in self.weights:
            step = max(1, _ALIGNMENT_BYTES // weight.element_bytes)
            elements = -(-elements // step) * step + weight.elements
        return -(-elements // world_size)

    @property
    def trainable(self) -> bool:
        """A flat parameter is trained as a whole or not at all."""
        return self.weights[0].trainable

    @property
    def elements(self) -> int:
        """Without padding."""
        return sum(weight.elements for weight in self.weights)


def flat_parameters(weights: Iterable[Weight]) -> list[FlatParameter]:
    """FSDP1's flat parameters of one unit and the units within it.

    Where only some parameters are trained (adapters), PEFT's wrapping policy makes each of those a unit of its own.
    """
    weights = list(weights)
    frozen = tuple(weight for weight in weights if not weight.trainable)
    trained = tuple(weight for weight in weights if weight.trainable)
    if not frozen:
        return [FlatParameter(weights=trained)] if trained else []
    return [FlatParameter(weights=frozen), *(FlatParameter(weights=(weight,)) for weight in trained)]


def units(weights: Iterable[Weight]) -> dict[int | None, tuple[Weight, ...]]:
    """The parameters of each decoder layer, and under None those of the root: what lies outside the layers."""
    found: dict[int | None, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.layer, []).append(weight)
    return {layer: tuple(members) for layer, members in found.items()}
