"""Cut the runs on several GPUs as they were: FSDP1 through accelerate 1.0.1, each decoder layer a unit.

With the fused kernels of QLoRA, fms-acceleration leaves the adapters to themselves: FSDP ignores them, hooks average
their gradients (lora_adapters_switch_ddp_from_fsdp), and each rank has all of them. They come to the GPU after the
trainer has been made and before its training begins: transformers' memory tracker adds up what changed in between
these two, so that the measured figures lack the adapters' weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.memory_public.rows import Row
from brim.memory.events import EventStream, Weight
from brim.memory.fsdp import Sharding
from brim.memory.fsdp.units import Precision

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


def cut_weights(row: Row, weights: Sequence[Weight], stream: EventStream) -> list[Weight]:
    """Return the parameters that FSDP cuts. Adapters that it ignores take nothing in the stream, as the tracker saw."""
    if row.gpus == 1 or row.quantization != "nf4" or row.loss == "stock":
        return list(weights)
    for weight in weights:
        if weight.trainable:
            stream.sizes[weight.storage] = 0
    return [weight for weight in weights if not weight.trainable]
