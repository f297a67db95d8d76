"""How the runs on several GPUs were cut: FSDP1 through accelerate 1.0.1, each decoder layer a unit."""

from __future__ import annotations

from benchmarks.memory_public.rows import Row
from brim.memory.sharding import Sharding
from brim.memory.sharding_units import Precision

_FP32_BYTES, _HALF_BYTES = 4, 2


def sharding_of(row: Row) -> Sharding:
    """With autocast, accelerate keeps the shards that are trained in fp32, gathers and reduces in 16 bits."""
    if row.gpus == 1:
        return Sharding(world_size=1, kind="whole")
    mixed = Precision(shard_bytes=_FP32_BYTES, gathered_bytes=_HALF_BYTES)
    return Sharding(
        world_size=row.gpus,
        kind="fsdp1",
        precision=Precision() if row.precision == "no AMP" else mixed,
        reentrant_checkpoints=True,
    )
