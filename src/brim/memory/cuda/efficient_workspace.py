"""The scratch space of the memory-efficient attention's backward kernel.

After Params::workspace_size in mem_eff_attention/kernel_backward.h, the kernels of kernels/cutlassB.h in their order,
and the splitting of the keys in attention_backward.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from brim.memory.cuda.target import CudaTarget, asked_of_target

_SMALL_SHARED_MEMORY = (86, 87, 89, 120, 121)  # at most 99 KiB a block, too little for tiles of 128 × 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a backward kernel cuts the scores."""

    queries: int  # kBlockSizeI
    keys: int  # kBlockSizeJ
    widest: int | None  # kMaxK: the largest head dimension that it takes; None: any


@asked_of_target
def workspace_bytes(
    *,
    rows: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    dropout: bool,
    target: CudaTarget,
) -> int:
    """Bytes that gradients are accumulated in, over rows and heads."""
    half = dtype != torch.float32
    tile = tile_of(max(head_dim, value_dim), half=half, dropout=dropout, target=target)
    in_registers = half and tile.widest is not None and tile.widest <= tile.queries
    elements = 0
    if half and not in_registers:  # of dK and dV
        splits = max(1, min(-(-keys // tile.keys), 200 // (rows * heads)))
        if rows * heads >= 256 and keys <= 2 * tile.keys:
            splits = 1
        if target.deterministic:
            splits = 1
        elements += splits * tile.keys * sum(-(-dim // tile.queries) * tile.queries for dim in (head_dim, value_dim))
    if target.sm >= 70 or half:  # of dQ; 16 bytes of lock and counter a tile
        tiles = -(-queries // tile.queries) * -(-head_dim // tile.keys)
        elements += tiles * (tile.queries * tile.keys + 4)
    return rows * heads * -(-elements // 4) * 4 * 4


def tile_of(head_dim: int, *, half: bool, dropout: bool, target: CudaTarget) -> Tile:
    """The first kernel of the list that takes this head dimension and fits into shared memory."""
    roomy = target.sm >= 80 and target.sm not in _SMALL_SHARED_MEMORY
    if head_dim <= 32:
        return Tile(queries=64, keys=64, widest=32)
    if head_dim <= 64:
        return Tile(queries=64, keys=64, widest=64)
    if half and head_dim <= 96 and target.sm in (86, 89) and not dropout:
        return Tile(queries=128, keys=64, widest=96)
    widest = 128 if head_dim <= 128 else None
    if target.sm < 80:
        wide = half and target.sm >= 70
        return Tile(queries=128 if wide else 64, keys=64, widest=widest)
    if half and widest and roomy:
        return Tile(queries=128, keys=128, widest=128)
    return Tile(queries=128 if roomy else 64, keys=64, widest=widest)
