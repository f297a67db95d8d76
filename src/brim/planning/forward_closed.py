"""What scoring takes at most, and about how long, in closed form: enough for a job that is shorter than tracing.

The bound is several times what the napkin counts, so a batch that fits by it fits; it wastes memory, and so it is not
used where the time that memory saves is worth a few traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs
from brim.batching.surface import Surface
from brim.config import Config
from brim.errors import ModelError
from brim.memory.activation_rule import kept_in_a_layer
from brim.memory.architecture import Architecture, read_architecture
from brim.memory.device_speed import DeviceSpeed
from brim.memory.napkin_settings import Settings, settings_of
from brim.planning.forward_model import MOST_TOKENS

# A layer's pass keeps less than what it would keep for a backward pass, but has temporary tensors: tests compare the
# bound with traces of each family.
_TIMES_A_LAYER = 4
_FP32_BYTES = 4
_KERNELS_A_LAYER = 40  # of a Llama in transformers 5
_TOKENS = tuple(2**power for power in range(3, 1 + MOST_TOKENS.bit_length() - 1))
_DTYPES = {"fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def closed_costs(
    config: Config, base_config: Mapping[str, Any], lengths: ArrayLike, *, static_bytes: int, speed: DeviceSpeed
) -> Costs | None:
    """None for an architecture whose parts are not known.

    config: resolved. base_config: the base model's config.json. static_bytes: of the weights, and what is beside them.
    """
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    if not architecture.is_known:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    ends = tuple(sorted({int(tokens.min()), int(tokens.max())}))
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=ends[-1])
    numbers = np.array(_TOKENS, dtype=np.float64)
    dtype = _DTYPES.get(str(config.precision), "float32")
    peaks = [static_bytes + bytes_of_token(architecture, settings, length) * numbers for length in ends]
    times = [_seconds(architecture, numbers, length, speed, dtype) for length in ends]
    return Costs(
        peak=_surface(ends, peaks, base=static_bytes),
        static_bytes=static_bytes,
        time=_surface(ends, times, base=float(_seconds(architecture, np.zeros(1), ends[0], speed, dtype)[0])),
    )


def weight_bytes(config: Config, base_config: Mapping[str, Any]) -> int | None:
    """Of a model that is not loaded; None where its parts are not known."""
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=2)
    return sum(architecture.parameters().values()) * settings.weights.element_bytes


def bytes_of_token(architecture: Architecture, settings: Settings, length: int) -> int:
    """What a token adds at most, in rows of this length, with all logits at once."""
    # As they come, the supervised ones of them, in fp32, and their logarithms.
    of_logits = architecture.vocabulary * 2 * (settings.arithmetic.compute_bytes + _FP32_BYTES)
    return bytes_of_token_in_layers(architecture, settings, length) + of_logits


def bytes_of_token_in_layers(architecture: Architecture, settings: Settings, length: int) -> int:
    """The same without logits."""
    parts = kept_in_a_layer(
        architecture,
        settings.arithmetic,
        lora=settings.lora,
        attention=settings.attention,
        sequence_length=length,
    )
    return _TIMES_A_LAYER * sum(part.bytes_per_token for part in parts)


def _seconds(
    architecture: Architecture, tokens: NDArray[np.float64], length: int, speed: DeviceSpeed, dtype: str
) -> NDArray[np.float64]:
    """FLOPs and kernels alone."""
    a_layer = sum(
        each.inputs * each.outputs * (architecture.experts_per_token if each.copies > 1 else 1)
        for each in architecture.linears
    )
    flops = 2 * (architecture.layers * a_layer + architecture.vocabulary * architecture.hidden)
    scores = 2 * architecture.layers * architecture.heads * architecture.head_dim * length  # causal: half of them
    device = tokens * (flops / speed.flops_per_s("matrix", dtype) + scores / speed.flops_per_s("attention", dtype))
    host = np.full(len(tokens), architecture.layers * _KERNELS_A_LAYER * speed.host_s_per_kernel)
    return np.asarray(np.maximum(device, host) if speed.is_asynchronous else device + host)


def _surface(lengths: tuple[int, ...], lines: list[NDArray[np.float64]], *, base: float) -> Surface:
    return Surface(
        base=base,
        lengths=lengths,
        tokens=(_TOKENS,) * len(lengths),
        values=tuple(tuple(line.tolist()) for line in lines),
    )
