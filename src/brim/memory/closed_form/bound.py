"""Bound what passes without gradients take, in closed form: for jobs that are shorter than tracing.

The bound is several times what the closed form of `brim memory --explain` counts line by line (breakdown.py), so a
batch that fits by it fits; it wastes memory, and so it is not used where the time that memory saves is worth a few
traces. Seconds are about right, and no bound. Tests compare both with traces of each family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Costs, Surface
from brim.config.schema import Config, GenerationConfig
from brim.errors import ModelError
from brim.infer.engines import CacheCosts
from brim.memory.closed_form.architecture import Architecture, read_architecture
from brim.memory.closed_form.breakdown import Settings, settings_of
from brim.memory.closed_form.trained import FP32_BYTES, kept_in_a_layer
from brim.memory.devices import DeviceSpeed

# A layer's pass keeps less than what it would keep for a backward pass, but has temporary tensors.
_TIMES_A_LAYER = 4


_KERNELS_OF_SCORING, _KERNELS_OF_STEP = 40, 45  # a layer of a Llama in transformers 5, without and with a cache


_TOKENS = tuple(2**power for power in range(3, 19))  # of batches, up to planning's MOST_TOKENS


_NUMBERS = (1, 2**20)  # of tokens of prompts, or of rows: bytes lie on a line


# A score takes this while a token is drawn: fp32 three times (scaled, narrowed, probabilities), and fp64 sums.
_BYTES_OF_SCORE = 3 * 4 + 2 * 8


_COPIES = 4  # of a layer's keys and values, repeated for each query head: as they are, and as a kernel wants them


# transformers' `generate` keeps more of them: narrowed, as logarithms, added to what a beam has, and sorted.
_BYTES_OF_SCORE_IN_GENERATE = 2 * _BYTES_OF_SCORE


_BYTES_OF_WRITTEN_TOKEN = 128  # beams' sequences, finished and not, their copies and the beams that they continue


_BYTES_OF_MASKED = 8  # of a query and a key: whether one sees the other, and the same as a number that is added


_TIMES_THROUGH_CACHE = 5  # a step of `generate` copies it for a token more and for the beams that go on, and reads it


# A matrix's product with few rows reads the matrix; half of the parameters' bytes more are read and written beside it.
_TRAFFIC = 1.5


_DTYPES = {"fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBound:
    """Bound what passes without gradients of one model take."""

    architecture: Architecture
    config: Config
    base_config: Mapping[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights of a model that is not loaded."""
        element_bytes = self._settings(2).weights.element_bytes
        return sum(self.architecture.parameters().values()) * element_bytes

    def bytes_of_token(self, length: int) -> int:
        """Return what a token adds at most, in rows of this length, with all logits at once."""
        # All logits, the supervised ones of them, in fp32, and their logarithms.
        of_logits = self.architecture.vocabulary * 2 * (self._settings(length).arithmetic.compute_bytes + FP32_BYTES)
        return self._bytes_in_layers(length) + of_logits

    def scoring(self, lengths: ArrayLike, *, static_bytes: int, speed: DeviceSpeed) -> Costs:
        """Return the costs of scoring rows of these lengths. static_bytes: of the weights, and what is beside them."""
        tokens = np.asarray(lengths, dtype=np.int64)
        ends = tuple(sorted({int(tokens.min()), int(tokens.max())}))
        numbers = np.array(_TOKENS, dtype=np.float64)
        peaks = [static_bytes + self.bytes_of_token(length) * numbers for length in ends]
        times = [self._scoring_s(numbers, length, speed) for length in ends]
        return Costs(
            peak=_surface(ends, _TOKENS, peaks, base=static_bytes),
            static_bytes=static_bytes,
            time=_surface(ends, _TOKENS, times, base=float(self._scoring_s(np.zeros(1), ends[0], speed)[0])),
        )

    def generation(
        self, lengths: ArrayLike, *, static_bytes: int, prefill_tokens: int, is_slots: bool = True
    ) -> CacheCosts:
        """Return the costs of generation for prompts of these lengths.

        static_bytes: of the weights. is_slots: with brim's own engine; else with transformers' `generate`, which holds
        nothing between batches and counts in prompts with all their beams.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        ends = sorted({int(tokens.min()), int(tokens.max())})
        response_columns = self._new_tokens - 1 if is_slots else self._new_tokens
        columns = [length + response_columns for length in ends]
        if is_slots:
            cell_bytes = float(self.architecture.layers * self._cell_bytes_of_layer)
            prefill = [self._prefill_bytes(length) for length in ends]
            step = [self._step_bytes(each) for each in columns]
        else:
            cell_bytes, prefill = 0.0, [0.0] * len(ends)
            step = [self._generate_bytes(length) for length in ends]
        return CacheCosts(
            static_bytes=static_bytes,
            cell_bytes=cell_bytes,
            prefill=_proportional(ends, prefill),
            step=_proportional(columns, step),
            prefill_tokens=prefill_tokens,
            response_columns=response_columns,
            shortest_tokens=ends[0],
        )

    def generation_s(
        self, lengths: ArrayLike, costs: CacheCosts, speed: DeviceSpeed, *, rows: int, is_slots: bool = True
    ) -> float:
        """Return about the seconds where so many rows run together and every response is as long as it may be."""
        tokens, generation = np.asarray(lengths, dtype=np.int64), self.config.generation
        layers = self.architecture.layers
        a_token_s = 2 * sum(self.architecture.parameters().values()) / speed.flops_per_s("matrix", self._dtype)
        steps = -(-len(tokens) // rows) * costs.response_columns
        columns = int(tokens.max()) + costs.response_columns
        cell_bytes, copies = costs.cell_bytes, 1
        if not is_slots:
            copies = _copies_of_row(generation)
            cell_bytes = _TIMES_THROUGH_CACHE * copies * layers * self._cell_bytes_of_layer
        traffic_s = (_TRAFFIC * costs.static_bytes + rows * columns * cell_bytes) / speed.bytes_per_s
        host_s = layers * _KERNELS_OF_STEP * speed.host_s_per_kernel
        tokens_a_step = rows * copies
        if not is_slots and not generation.use_cache:
            tokens_a_step *= columns
        device_s = max(tokens_a_step * a_token_s, traffic_s)
        a_step_s = max(device_s, host_s) if speed.is_asynchronous else device_s + host_s
        return float(tokens.sum()) * copies * a_token_s + steps * a_step_s

    @property
    def _dtype(self) -> str:
        return _DTYPES.get(str(self.config.precision), "float32")

    @property
    def _new_tokens(self) -> int:
        assert self.config.generation.max_new_tokens is not None, "resolved before"
        return self.config.generation.max_new_tokens

    @property
    def _cell_bytes_of_layer(self) -> int:
        width = self.architecture.kv_heads * self.architecture.head_dim
        return 2 * width * self._settings(2).arithmetic.compute_bytes

    def _settings(self, length: int) -> Settings:
        return settings_of(
            self.config, self.base_config, phase="evaluate", batch_size=1, sequence_length=max(length, 2)
        )

    def _bytes_in_layers(self, length: int) -> int:
        """Return the bytes of a token without logits."""
        settings = self._settings(length)
        parts = kept_in_a_layer(
            self.architecture,
            settings.arithmetic,
            lora=settings.lora,
            attention=settings.attention,
            sequence_length=length,
            recomputed=True,
        )
        return _TIMES_A_LAYER * sum(part.bytes_per_token for part in parts)

    def _scoring_s(self, tokens: NDArray[np.float64], length: int, speed: DeviceSpeed) -> NDArray[np.float64]:
        """Return the seconds of FLOPs and kernels alone."""
        of = self.architecture
        a_layer = sum(
            each.inputs * each.outputs * (of.experts_per_token if each.copies > 1 else 1) for each in of.linears
        )
        flops = 2 * (of.layers * a_layer + of.vocabulary * of.hidden)
        scores = 2 * of.layers * of.heads * of.head_dim * length  # causal: half of them
        dtype = self._dtype
        device = tokens * (flops / speed.flops_per_s("matrix", dtype) + scores / speed.flops_per_s("attention", dtype))
        host = np.full(len(tokens), of.layers * _KERNELS_OF_SCORING * speed.host_s_per_kernel)
        return np.asarray(np.maximum(device, host) if speed.is_asynchronous else device + host)

    def _prefill_bytes(self, length: int) -> float:
        """Return the bytes of a token, with the scores of one: a prompt has them for its last token alone."""
        return float(self.bytes_of_token(length) + self.architecture.vocabulary * _BYTES_OF_SCORE)

    def _step_bytes(self, columns: int) -> float:
        """Return the bytes of a row in a step."""
        copies = _COPIES * self._groups * columns * self._cell_bytes_of_layer
        return self.bytes_of_token(columns) + self.architecture.vocabulary * _BYTES_OF_SCORE + copies

    def _generate_bytes(self, length: int) -> float:
        """Return the bytes of a prompt with all its beams, at the end of the longest response or while it is read.

        All prompts of a batch are read together, each as often as it has beams; without a cache, all tokens at each
        step.
        """
        generation, columns = self.config.generation, length + self._new_tokens
        read = length if generation.use_cache else columns
        cache = (self.architecture.layers + _COPIES * self._groups) * columns * self._cell_bytes_of_layer
        reading = read * (self._bytes_in_layers(read) + read * _BYTES_OF_MASKED)
        of_each = cache + max(reading, self._bytes_in_layers(columns)) + columns * _BYTES_OF_WRITTEN_TOKEN
        of_each += self.architecture.vocabulary * _BYTES_OF_SCORE_IN_GENERATE  # a model keeps those of the last token
        return float(_copies_of_row(generation) * of_each)

    @property
    def _groups(self) -> int:
        return max(self.architecture.heads // max(self.architecture.kv_heads, 1), 1)


def forward_bound(config: Config, base_config: Mapping[str, Any]) -> ForwardBound | None:
    """Return the bound of a model; None for an architecture whose parts are not known.

    config: resolved. base_config: the base model's config.json.
    """
    try:
        architecture = read_architecture(base_config)
    except ModelError:
        return None
    if not architecture.is_known:
        return None
    return ForwardBound(architecture=architecture, config=config, base_config=base_config)


def _copies_of_row(generation: GenerationConfig) -> int:
    """Return how often a row is in a pass: once for each beam; twice with guidance, which has a cache of its own."""
    return generation.num_beams * (1 if generation.guidance_scale is None else 2)


def _proportional(lengths: Sequence[int], bytes_of_one: Sequence[float]) -> Surface:
    return _surface(lengths, _NUMBERS, [each * np.array(_NUMBERS, dtype=np.float64) for each in bytes_of_one], base=0.0)


def _surface(
    lengths: Sequence[int], numbers: tuple[int, ...], lines: Sequence[NDArray[np.float64]], *, base: float
) -> Surface:
    return Surface(
        base=base,
        lengths=tuple(lengths),
        tokens=(numbers,) * len(lengths),
        values=tuple(tuple(line.tolist()) for line in lines),
    )
