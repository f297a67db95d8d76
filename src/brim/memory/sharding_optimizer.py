"""Sizes that an optimizer's tensors have when its parameters are shards."""

from __future__ import annotations

from collections.abc import Iterable

from brim.memory.sharding_units import Precision, Weight, shard_elements

_ELEMENT_BYTES = (1, 2, 4, 8)
_SCALED_BLOCK = 256  # elements that share a 4-byte scale in bitsandbytes' 8-bit states (bitsandbytes.optim.optimizer)


def sharded_sizes(weights: Iterable[Weight], *, world_size: int, precision: Precision, by_rows: bool) -> dict[int, int]:
    """Bytes of a tensor of each trainable parameter's shape -> bytes of one of its shard's.

    The optimizer computes element by element, so that what it allocates has the shape of a parameter, or of its
    blocks' scales; anything of another size (a step's count, a norm) is not cut. Where two parameters of one size have
    shards of different size the larger one counts. by_rows: FSDP2's cut along the first dimension; FSDP1 cuts a flat
    parameter anywhere, so that on average each rank has an equal part of each of its parameters.
    """
    sizes: dict[int, int] = {}
    for weight in weights:
        if not weight.trainable:
            continue
        whole = weight.elements
        part = shard_elements(weight.shape, world_size) if by_rows else -(-whole // world_size)
        kept = precision.in_shards(weight)
        for element_bytes in _ELEMENT_BYTES:
            wide = kept if element_bytes == weight.element_bytes else element_bytes
            _enter(sizes, whole * element_bytes, part * wide)
        if whole > _SCALED_BLOCK:
            _enter(sizes, 4 * -(-whole // _SCALED_BLOCK), 4 * -(-part // _SCALED_BLOCK))
    return sizes


def _enter(sizes: dict[int, int], whole: int, part: int) -> None:
    sizes[whole] = max(part, sizes.get(whole, 0))
