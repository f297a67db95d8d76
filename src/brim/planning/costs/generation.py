"""Predict what generation costs in memory and time, by a few traces.

They give the costs of every shape that a plan may ask for. The time of a pass is its counted work divided by the
device's figures. As many tokens of prompts pass together as pay, and few enough that memory is left for rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Surface
from brim.infer.engines import CacheCosts, CacheShape, usual_pass_tokens
from brim.memory.devices import DeviceSpeed
from brim.planning.costs.sampling import round_length, round_rows, sampled_length, short_length, through
from brim.planning.costs.time import WorkLaw, fewest_near_least, law_through, roofline
from brim.planning.costs.traces import Found, Traces
from brim.planning.costs.workloads import SlotsGeneration
from brim.units import format_bytes

_Point: TypeAlias = tuple[int, int]  # N, bytes


_Sample: TypeAlias = tuple[CacheShape, Found]


_MUCH_SHORTER = 0.75  # of the longest prompt; shorter ones get samples of their own


_PASS_TOKENS = 1024  # of a pass over several prompts; more make none faster but packed ones: see `tokens_that_pay`


# Some kernels are for few rows alone: bitsandbytes' product of a vector, up to 4 rows.
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel:
    """Predict what generation of one configuration costs on one device."""

    traces: Traces
    costs: CacheCosts  # every prompt passes alone, until `with_passes`
    times: PassTimes
    load_peak_bytes: int

    @classmethod
    def of(
        cls,
        traces: Traces,
        lengths: ArrayLike,
        *,
        max_new_tokens: int,
        most_rows: int,
        cap_bytes: int,
        context_length: int | None,
    ) -> CacheModel:
        """Return the model of these prompts, by two samples, or four where prompts differ much in length.

        lengths: tokens of the prompts. context_length: tokens that the model takes at most.
        """
        prompts = np.asarray(lengths, dtype=np.int64)
        # brim's own engine reads prompts pass by pass, and does not keep the last token.
        is_slots = isinstance(traces.workload, SlotsGeneration)
        is_packed = is_slots and traces.workload.config.is_packed
        longest = sampled_length(prompts, context=None if context_length is None else context_length - max_new_tokens)
        short = round_length(short_length(prompts))
        where = _Region(
            longest=longest,
            short=short if short <= _MUCH_SHORTER * longest else longest,
            response_columns=max_new_tokens - 1 if is_slots else max_new_tokens,
            most_rows=max(2, most_rows),
            cap_bytes=cap_bytes,
            passes_alone=is_slots,
            pass_tokens=max(_PASS_TOKENS, usual_pass_tokens(is_packed=is_packed, is_cuda=traces.speed.is_asynchronous)),
        )
        lines = _lines(traces, where)
        samples = [each for line in lines for each in line]
        static_bytes, cell_bytes = _held(samples)
        return cls(
            traces=traces,
            costs=CacheCosts(
                static_bytes=static_bytes,
                cell_bytes=cell_bytes,
                prefill=_surface({line[0][0].prompt_tokens: [*map(_of_prefill, line)] for line in lines}),
                step=_surface({line[0][0].columns: [*map(_of_step, line)] for line in lines}),
                prefill_tokens=1,
                response_columns=where.response_columns,
                shortest_tokens=int(prompts.min()),
                is_packed=is_packed,
            ),
            times=PassTimes(
                prefill=law_through(
                    [(_of_prefill(each)[0], each[0].prompt_tokens, each[1].work["prefill"]) for each in samples]
                ),
                step=law_through([(shape.rows, shape.columns, found.work["step"]) for shape, found in samples]),
                speed=traces.speed,
            ),
            load_peak_bytes=max(found.numbers["load_peak"] for _, found in samples),
        )

    def verified(self, shape: CacheShape) -> CacheModel:
        """Return the model after one more trace: exact there."""
        _, found = sample = _sample(self.traces, shape)
        costs = replace(
            self.costs,
            prefill=through(self.costs.prefill, _of_prefill(sample)[0], shape.prompt_tokens, found.numbers["prefill"]),
            step=through(self.costs.step, shape.rows, shape.columns, found.numbers["step"]),
        )
        return replace(self, costs=costs)

    def with_passes(self, *, cap_bytes: int, longest: int, usual: int) -> tuple[CacheModel, str]:
        """Return the model with as many tokens of prompts in a pass as pay, and why. Longer prompts pass alone.

        longest, usual: tokens of a prompt.
        """
        tokens, reason = self.times.tokens_that_fit(self.costs, cap_bytes=cap_bytes, longest=longest, usual=usual)
        return replace(self, costs=self.costs.with_passes_of(tokens, longest=longest)), reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Bound the shapes that a plan may ask for."""

    longest: int  # tokens of a prompt
    short: int  # tokens of the shortest prompts that matter
    response_columns: int
    most_rows: int
    cap_bytes: int
    passes_alone: bool  # whether a pass may read some of the prompts; else all rows' are read together
    pass_tokens: int  # of a pass over several prompts

    def shape(self, tokens: int, *, rows: int, prompts: int) -> CacheShape:
        """Return the shape of prompts of so many tokens."""
        rows = max(rows, prompts)
        return CacheShape(
            rows=rows,
            columns=tokens + self.response_columns,
            prompts=prompts if self.passes_alone else rows,
            prompt_tokens=tokens,
        )


def _sample(traces: Traces, shape: CacheShape) -> _Sample:
    return shape, traces.find(astuple(shape))


def _lines(traces: Traces, where: _Region) -> list[list[_Sample]]:
    """Return few rows and many of each length, the shortest first."""
    many = _most_rows(_sample(traces, where.shape(where.longest, rows=2, prompts=1)), where)
    return [
        [
            _sample(traces, where.shape(tokens, rows=min(_FEW_ROWS, max(many // 2, 1)), prompts=1)),
            _sample(traces, where.shape(tokens, rows=many, prompts=min(max(2, -(-where.pass_tokens // tokens)), many))),
        ]
        for tokens in sorted({where.short, where.longest})
    ]


def _most_rows(first: _Sample, where: _Region) -> int:
    """Return how many rows of the shortest prompts fit under the cap by the cache alone; at least 2."""
    shape, numbers = first[0], first[1].numbers
    held_bytes = numbers["held"] - numbers["loaded"]
    cell_bytes = (held_bytes or numbers["step"]) / (shape.rows * shape.columns)
    room_bytes = max(where.cap_bytes - numbers["loaded"], 0)
    rows = int(room_bytes / cell_bytes) // (where.short + where.response_columns) + 1
    return min(max(round_rows(rows), 2), where.most_rows)


def _held(samples: Sequence[_Sample]) -> tuple[int, float]:
    """Return what lives between passes: bytes whatever the shape, and for each row and column of the cache."""
    by_cells = sorted(
        ((shape.rows * shape.columns, found.numbers) for shape, found in samples), key=lambda each: each[0]
    )
    (fewest, least), (most, largest) = by_cells[0], by_cells[-1]
    if fewest == most:
        return least["loaded"], (least["held"] - least["loaded"]) / fewest
    cell_bytes = (largest["held"] - least["held"]) / (most - fewest)
    return round(least["held"] - cell_bytes * fewest), cell_bytes


def _of_prefill(sample: _Sample) -> _Point:
    shape, found = sample
    return shape.prompts * shape.prompt_tokens, found.numbers["prefill"]


def _of_step(sample: _Sample) -> _Point:
    return sample[0].rows, sample[1].numbers["step"]


def _surface(lines: Mapping[int, Sequence[_Point]]) -> Surface:
    """Return the surface through the lines of each length, the shortest first."""
    ordered = [sorted(dict(line).items()) for line in lines.values()]
    return Surface(
        base=float(ordered[0][0][1]),
        lengths=tuple(lines),
        tokens=tuple(tuple(number for number, _ in line) for line in ordered),
        values=tuple(tuple(np.maximum.accumulate([float(value) for _, value in line]).tolist()) for line in ordered),
    )


_SHARE = 0.1  # of the memory beside the weights: what passes over prompts take, the cache cannot have


_LEAST = 64  # tokens; below it a pass takes as long as one of so many on any device


WORTH = 0.02  # of the time of a row's token; rows that save less only wait for each other at the end


_PASSES = tuple(2**power for power in range(6, 13))  # tokens of a pass over prompts that are compared


_GAIN = 0.1  # of the time of a token; larger passes that save less are not worth theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Predict the seconds of passes: over N tokens of prompts of T, and over N rows of T columns."""

    prefill: WorkLaw
    step: WorkLaw
    speed: DeviceSpeed

    def prefill_s(self, tokens: ArrayLike, length: ArrayLike) -> NDArray[np.float64]:
        """Return those of passes over so many tokens, of prompts of this length."""
        return roofline(self.prefill, self.speed, tokens, length).total_s

    def step_s(self, rows: ArrayLike, columns: ArrayLike) -> NDArray[np.float64]:
        """Return those of a token of every row."""
        return roofline(self.step, self.speed, rows, columns).total_s

    def rows_that_pay(self, columns: int, *, most: int) -> int:
        """Return the fewest rows with which a row's token takes hardly longer than with all of them."""
        rows = np.arange(1, most + 1)
        return fewest_near_least(rows, self.step_s(rows, columns), within=WORTH)

    def tokens_that_pay(self, length: int) -> int:
        """Return the tokens of a pass over prompts from which on a larger one is hardly faster."""
        tokens = np.array(_PASSES)
        return fewest_near_least(tokens, self.prefill_s(tokens, length), within=_GAIN)

    def tokens_that_fit(self, costs: CacheCosts, *, cap_bytes: int, longest: int, usual: int) -> tuple[int, str]:
        """Return how many tokens of prompts pass together, and why. longest, usual: tokens of a prompt."""
        pays, reason = self.tokens_that_pay(usual), "larger passes read prompts hardly faster"
        if costs.is_packed and self.speed.is_asynchronous:  # what the law of the kernels' work does not know
            enough = usual_pass_tokens(is_packed=True, is_cuda=True)
            pays, reason = max(pays, enough), "packed prompts, with which a GPU is busy"
        room_bytes = _SHARE * max(cap_bytes - costs.static_bytes, 0)

        def added_bytes(tokens: int) -> float:
            length = min(tokens, longest)
            return costs.scale * float(costs.prefill(max(tokens // length, 1), length))

        tokens = pays
        while tokens > max(_LEAST, longest) and added_bytes(tokens) > room_bytes:
            tokens //= 2
        if tokens < pays:
            taken = f"passes over prompts take no more than {_SHARE:.0%} of the memory beside the weights"
            return tokens, f"{taken}, {format_bytes(round(room_bytes))}"
        return tokens, reason
