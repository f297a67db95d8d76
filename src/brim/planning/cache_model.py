"""What generation takes in memory and time, for every shape that a plan may ask for, from a few traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from brim.batching.surface import Surface
from brim.infer.cache_costs import CacheCosts
from brim.infer.cache_shape import CacheShape
from brim.planning.memory_samples import round_length, round_rows, through
from brim.planning.traced_caches import CacheSample
from brim.planning.work_law import WorkLaw, law_through

_Point: TypeAlias = tuple[int, int]  # N, bytes

_LENGTH_STEP = 64  # prompts' lengths are rounded up to it, so that other data of the same kind meets the same samples
_SHARE_OF_SHORT_PROMPTS = 10  # percent
_MUCH_SHORTER = 0.75  # of the longest prompt; below it a length gets samples of its own
_PASS_TOKENS = 1024  # of a pass over several prompts; more make none faster: see planning/prefill_tokens.py
# Some kernels are for few rows alone: bitsandbytes' product of a vector, up to 4 rows.
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRegion:
    """The shapes that a plan may ask for."""

    longest: int  # tokens of a prompt
    short: int  # tokens of the shortest prompts that matter
    shortest: int
    response_columns: int
    most_rows: int
    cap_bytes: int
    passes_alone: bool  # whether a pass may read some of the prompts; else all rows' are read together


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel:
    """Of one configuration on one device."""

    costs: CacheCosts  # every prompt passes alone, until somebody says how many tokens pass together
    load_peak_bytes: int
    prefill_law: WorkLaw  # N tokens of prompts of T
    step_law: WorkLaw  # N rows of T columns


def cache_region(
    lengths: ArrayLike,
    *,
    max_new_tokens: int,
    most_rows: int,
    cap_bytes: int,
    context: int | None,
    is_slots: bool = True,
) -> CacheRegion:
    """lengths: tokens of the prompts. context: tokens that the model takes at most.

    is_slots: brim's own engine, which reads prompts pass by pass and does not keep the last token.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    longest = int(tokens.max())
    rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    if context is not None:
        rounded = max(min(rounded, context - max_new_tokens), longest)
    short = round_length(int(np.percentile(tokens, _SHARE_OF_SHORT_PROMPTS, method="inverted_cdf")))
    return CacheRegion(
        longest=rounded,
        short=short if short <= _MUCH_SHORTER * rounded else rounded,
        shortest=int(tokens.min()),
        response_columns=max_new_tokens - 1 if is_slots else max_new_tokens,
        most_rows=max(2, most_rows),
        cap_bytes=cap_bytes,
        passes_alone=is_slots,
    )


def cache_model(sample: Callable[[CacheShape], CacheSample], where: CacheRegion) -> CacheModel:
    """sample: what costs time. Two samples, or four where prompts differ much in length."""
    first = sample(_shape(where, where.longest, rows=2, prompts=1))
    many = _most_rows(first, where)
    lines = [
        [
            sample(_shape(where, tokens, rows=min(_FEW_ROWS, max(many // 2, 1)), prompts=1)),
            sample(_shape(where, tokens, rows=many, prompts=min(max(2, -(-_PASS_TOKENS // tokens)), many))),
        ]
        for tokens in sorted({where.short, where.longest})
    ]
    samples = [each for line in lines for each in line]
    static_bytes, cell_bytes = _held(samples)
    costs = CacheCosts(
        static_bytes=static_bytes,
        cell_bytes=cell_bytes,
        prefill=_surface(
            [line[0].shape.prompt_tokens for line in lines], [[*map(_of_prefill, line)] for line in lines]
        ),
        step=_surface([line[0].shape.columns for line in lines], [[*map(_of_step, line)] for line in lines]),
        prefill_tokens=1,
        response_columns=where.response_columns,
        shortest_tokens=where.shortest,
    )
    return CacheModel(
        costs=costs,
        load_peak_bytes=max(each.load_peak_bytes for each in samples),
        prefill_law=law_through([(_of_prefill(s)[0], s.shape.prompt_tokens, s.prefill_work) for s in samples]),
        step_law=law_through([(s.shape.rows, s.shape.columns, s.step_work) for s in samples]),
    )


def verified(costs: CacheCosts, sample: CacheSample) -> CacheCosts:
    """The costs after one more trace: exact there."""
    return replace(
        costs,
        prefill=through(costs.prefill, _of_prefill(sample)[0], sample.shape.prompt_tokens, sample.prefill_bytes),
        step=through(costs.step, sample.shape.rows, sample.shape.columns, sample.step_bytes),
    )


def _shape(where: CacheRegion, tokens: int, *, rows: int, prompts: int) -> CacheShape:
    rows = max(rows, prompts)
    return CacheShape(
        rows=rows,
        columns=tokens + where.response_columns,
        prompts=prompts if where.passes_alone else rows,
        prompt_tokens=tokens,
    )


def _most_rows(first: CacheSample, where: CacheRegion) -> int:
    """Of the shortest columns that matter, as many as the cap has room for by the cache alone; at least 2."""
    cells = first.shape.rows * first.shape.columns
    held_bytes = first.held_bytes - first.loaded_bytes
    cell_bytes = (held_bytes or first.step_bytes) / cells
    room_bytes = max(where.cap_bytes - first.loaded_bytes, 0)
    rows = int(room_bytes / cell_bytes) // (where.short + where.response_columns) + 1
    return min(max(round_rows(rows), 2), where.most_rows)


def _held(samples: Sequence[CacheSample]) -> tuple[int, float]:
    """What lives between passes: bytes whatever the shape, and for each row and column of the cache."""
    ordered = sorted(samples, key=lambda each: each.shape.rows * each.shape.columns)
    least, most = ordered[0], ordered[-1]
    cells = [each.shape.rows * each.shape.columns for each in (least, most)]
    if cells[0] == cells[1]:
        return least.loaded_bytes, (least.held_bytes - least.loaded_bytes) / cells[0]
    cell_bytes = (most.held_bytes - least.held_bytes) / (cells[1] - cells[0])
    return round(least.held_bytes - cell_bytes * cells[0]), cell_bytes


def _of_prefill(sample: CacheSample) -> _Point:
    return sample.shape.prompts * sample.shape.prompt_tokens, sample.prefill_bytes


def _of_step(sample: CacheSample) -> _Point:
    return sample.shape.rows, sample.step_bytes


def _surface(lengths: Sequence[int], lines: Sequence[Sequence[_Point]]) -> Surface:
    """Through lines in the order of their lengths. Before its first point a line is no lower than the shortest's."""
    ordered = [sorted(dict(line).items()) for line in lines]
    return Surface(
        base=float(ordered[0][0][1]),
        lengths=tuple(lengths),
        tokens=tuple(tuple(number for number, _ in line) for line in ordered),
        values=tuple(tuple(np.maximum.accumulate([float(value) for _, value in line]).tolist()) for line in ordered),
    )
