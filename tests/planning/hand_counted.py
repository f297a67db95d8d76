"""Work of a made-up model, by a formula that is known."""

from __future__ import annotations

from brim.memory import DeviceSpeed
from brim.memory.trace import Work, WorkCount, WorkPlace

PRODUCT = WorkPlace("forward", 0, "layers.0.product", "aten::mm", "matrix", "bfloat16")
AGAIN = WorkPlace("recompute", 0, "layers.0.product", "aten::mm", "matrix", "bfloat16")
ATTENTION = WorkPlace("forward", 0, "layers.0.attention", "flash_attention", "attention", "bfloat16")
NORM = WorkPlace("forward", None, "norm", "aten::mul", "vector", "float32")


def hand_counted(rows: int, length: int, *, checkpointed: bool = False) -> WorkCount:
    """Weights of 10**6 bytes, 1,000 FLOPs and 100 bytes a token, 8 FLOPs for each pair of tokens."""
    tokens = rows * length
    places = {
        PRODUCT: Work(1000 * tokens, 10**6 + 100 * tokens, 4),
        ATTENTION: Work(8 * tokens * length, 60 * tokens, 2),
        NORM: Work(0, 400 * tokens, 3),
    }
    if checkpointed:
        places[AGAIN] = places[PRODUCT]
    return WorkCount(places=places)


def speed(*, host_s: float = 0.0, is_asynchronous: bool = True, least_s: float = 0.0) -> DeviceSpeed:
    """10**6 FLOP/s (attention half), 10**6 bytes a second."""
    return DeviceSpeed(
        name="slow",
        source="by hand",
        flops_by_dtype={"bfloat16": 1e6},
        attention_share=0.5,
        bytes_per_s=1e6,
        host_s_per_kernel=host_s,
        least_s_per_kernel=least_s,
        is_asynchronous=is_asynchronous,
    )
