"""What generation takes at most, and about how long, in closed form: enough for a job that is shorter than tracing.

See planning/forward_closed.py: what fits by the bound fits, and the bound wastes memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from brim.batching.surface import Surface
from brim.config import Config, GenerationConfig
from brim.errors import ModelError
from brim.infer.cache_costs import CacheCosts
from brim.memory.architecture import Architecture, read_architecture
from brim.memory.device_speed import DeviceSpeed
from brim.memory.napkin_settings import Settings, settings_of
from brim.planning.forward_closed import bytes_of_token, bytes_of_token_in_layers

_NUMBERS = (1, 2**20)  # of tokens of prompts, or of rows: bytes lie on a line
# Of a score while a token is drawn: fp32 three times (scaled, narrowed, probabilities), and fp64 sums.
_BYTES_OF_SCORE = 3 * 4 + 2 * 8
_COPIES = 4  # of a layer's keys and values, one for each head that asks: as they are, and as a kernel wants them
# transformers' `generate` keeps more of them: narrowed, as logarithms, added to what a beam has, and sorted.
_BYTES_OF_SCORE_IN_GENERATE = 2 * _BYTES_OF_SCORE
_BYTES_OF_WRITTEN_TOKEN = 128  # sequences of beams, finished and not, their copies and whose successors they are
_BYTES_OF_MASKED = 8  # of a query and a key: whether it sees it, and the same as a number that is added
_KERNELS_A_LAYER = 45  # of a Llama in transformers 5, with a cache
_TIMES_THROUGH_CACHE = 5  # a step of `generate` copies it for a token more and for the beams that go on, and reads it
# A matrix's product with few rows reads the matrix; half of the parameters' bytes more are read and written beside it.
_TRAFFIC = 1.5


def closed_cache_costs(
    config: Config,
    base_config: Mapping[str, Any],
    lengths: ArrayLike,
    *,
    static_bytes: int,
    prefill_tokens: int,
    is_slots: bool = True,
) -> CacheCosts | None:
    """None for an architecture whose parts are not known.

    config: resolved. base_config: the base model's config.json. static_bytes: of the weights. is_slots: with brim's own
    engine; else with transformers' `generate`, which holds nothing between batches and counts in prompts with all
    their beams.
    """
    known = _known(base_config)
    new_tokens = config.generation.max_new_tokens
    assert new_tokens is not None, "resolved before"
    if known is None:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    ends = sorted({int(tokens.min()), int(tokens.max())})
    settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=max(ends[-1], 2))
    if not is_slots:
        return CacheCosts(
            static_bytes=static_bytes,
            cell_bytes=0.0,
            prefill=_lines(ends, [0.0] * len(ends)),
            step=_lines(
                [length + new_tokens for length in ends],
                [_generate_bytes(known, settings, config.generation, length) for length in ends],
            ),
            prefill_tokens=prefill_tokens,
            response_columns=new_tokens,
            shortest_tokens=ends[0],
        )
    columns = [length + new_tokens - 1 for length in ends]
    return CacheCosts(
        static_bytes=static_bytes,
        cell_bytes=float(known.layers * _cell_bytes_of_layer(known, settings)),
        prefill=_lines(ends, [_prefill_bytes(known, settings, length) for length in ends]),
        step=_lines(columns, [_step_bytes(known, settings, each) for each in columns]),
        prefill_tokens=prefill_tokens,
        response_columns=new_tokens - 1,
        shortest_tokens=ends[0],
    )


def closed_seconds(
    config: Config,
    base_config: Mapping[str, Any],
    lengths: ArrayLike,
    costs: CacheCosts,
    speed: DeviceSpeed,
    *,
    rows: int,
    dtype: str,
    is_slots: bool = True,
) -> float | None:
    """Where so many rows run together and every response is as long as it may be."""
    known = _known(base_config)
    if known is None:
        return None
    tokens = np.asarray(lengths, dtype=np.int64)
    parameters = sum(known.parameters().values())
    a_token_s = 2 * parameters / speed.flops_per_s("matrix", dtype)
    steps = -(-len(tokens) // rows) * costs.response_columns
    columns = int(tokens.max()) + costs.response_columns
    cell_bytes, copies = costs.cell_bytes, 1
    if not is_slots:
        settings = settings_of(config, base_config, phase="evaluate", batch_size=1, sequence_length=columns)
        copies = _copies_of_row(config.generation)
        cell_bytes = _TIMES_THROUGH_CACHE * copies * known.layers * _cell_bytes_of_layer(known, settings)
    traffic_s = (_TRAFFIC * costs.static_bytes + rows * columns * cell_bytes) / speed.bytes_per_s
    host_s = known.layers * _KERNELS_A_LAYER * speed.host_s_per_kernel
    tokens_a_step = rows * copies
    if not is_slots and not config.generation.use_cache:
        tokens_a_step *= columns
    device_s = max(tokens_a_step * a_token_s, traffic_s)
    a_step_s = max(device_s, host_s) if speed.is_asynchronous else device_s + host_s
    return float(tokens.sum()) * copies * a_token_s + steps * a_step_s


def _known(base_config: Mapping[str, Any]) -> Architecture | None:
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    return architecture if architecture.is_known else None


def _cell_bytes_of_layer(architecture: Architecture, settings: Settings) -> int:
    return 2 * architecture.kv_heads * architecture.head_dim * settings.arithmetic.compute_bytes


def _prefill_bytes(architecture: Architecture, settings: Settings, length: int) -> float:
    """Of a token; scores are of the last one of a prompt alone, and of a prompt of one token of each."""
    return float(bytes_of_token(architecture, settings, length) + architecture.vocabulary * _BYTES_OF_SCORE)


def _step_bytes(architecture: Architecture, settings: Settings, columns: int) -> float:
    """Of a row."""
    groups = max(architecture.heads // max(architecture.kv_heads, 1), 1)
    copies = _COPIES * groups * columns * _cell_bytes_of_layer(architecture, settings)
    return bytes_of_token(architecture, settings, columns) + architecture.vocabulary * _BYTES_OF_SCORE + copies


def _generate_bytes(architecture: Architecture, settings: Settings, generation: GenerationConfig, length: int) -> float:
    """Of a prompt with all its beams, at the end of the longest response or while the prompt is read.

    All prompts of a batch are read together, each as often as it has beams; without a cache, all tokens at each step.
    """
    assert generation.max_new_tokens is not None, "resolved before"
    columns = length + generation.max_new_tokens
    read = length if generation.use_cache else columns
    groups = max(architecture.heads // max(architecture.kv_heads, 1), 1)
    cell_bytes = _cell_bytes_of_layer(architecture, settings)
    cache = (architecture.layers + _COPIES * groups) * columns * cell_bytes
    reading = read * (bytes_of_token_in_layers(architecture, settings, read) + read * _BYTES_OF_MASKED)
    writing = bytes_of_token_in_layers(architecture, settings, columns)
    of_each = cache + max(reading, writing) + columns * _BYTES_OF_WRITTEN_TOKEN
    of_each += architecture.vocabulary * _BYTES_OF_SCORE_IN_GENERATE  # of the last token: a model keeps no others
    return float(_copies_of_row(generation) * of_each)


def _copies_of_row(generation: GenerationConfig) -> int:
    """That are in a pass: one for each beam, and as many again for guidance, whose pass has a cache of its own."""
    return generation.num_beams * (1 if generation.guidance_scale is None else 2)


def _lines(lengths: list[int], bytes_of_one: list[float]) -> Surface:
    """In proportion to their number."""
    return Surface(
        base=0.0,
        lengths=tuple(lengths),
        tokens=(_NUMBERS,) * len(lengths),
        values=tuple(tuple(each * number for number in _NUMBERS) for each in bytes_of_one),
    )
