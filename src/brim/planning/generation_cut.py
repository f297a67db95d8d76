"""A job of generation under a cap: how many rows run together from its start to its end, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from brim.infer.cache_costs import CacheCosts
from brim.infer.room import MOST_ROWS, FixedRoom, MemoryRoom, Room
from brim.planning.budget import Budget
from brim.planning.generation_plan import GenerationPlan, PlannedRows, Source
from brim.planning.generation_waves import Waves, seconds, waves
from brim.planning.lengths import summarize_lengths
from brim.planning.pass_times import PassTimes
from brim.planning.prefill_tokens import PrefillTokens

_PARTS = 4  # of the job, of each of which the plan shows the first rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTask:
    """What is to be done, whatever the memory."""

    lengths: NDArray[np.int64]  # tokens of the prompts, the longest first; at least one
    max_new_tokens: int
    num_beams: int
    fixed_rows: int | None  # that run together, where somebody says so
    engine: str
    engine_reason: str
    alone_reason: str = ""  # why rows go one by one, where they do

    @property
    def longest(self) -> int:
        return int(self.lengths[0])

    @property
    def median(self) -> int:
        return int(self.lengths[len(self.lengths) // 2])

    @property
    def most_rows(self) -> int:
        """That can run together at all."""
        return 1 if self.alone_reason else min(self.fixed_rows or MOST_ROWS, len(self.lengths))


def cut(
    task: GenerationTask,
    budget: Budget,
    costs: CacheCosts,
    passes: PrefillTokens,
    *,
    source: Source,
    cap_bytes: int,
    times: PassTimes | None,
    notes: tuple[str, ...] = (),
) -> GenerationPlan:
    """times: None: it is not known which rows pay, and all are taken that fit."""
    columns = task.longest + costs.response_columns
    memory_rows = MemoryRoom(costs, cap_bytes=cap_bytes).rows(columns)
    most_rows = task.most_rows
    if times is not None and task.fixed_rows is None:
        most_rows = rows_that_pay(task, costs, times, cap_bytes=cap_bytes)
    room: Room = MemoryRoom(costs, cap_bytes=cap_bytes, most_rows=most_rows)
    if task.fixed_rows is not None:
        room = FixedRoom(task.most_rows, prefill_tokens=costs.prefill_tokens)
    of = waves(task.lengths, room, response_columns=costs.response_columns)
    shapes = _shapes(costs, of, num_rows=len(task.lengths))
    peak_bytes = max(shape.peak_bytes for shape in shapes)
    return GenerationPlan(
        budget=budget,
        prompts=summarize_lengths(task.lengths),
        max_new_tokens=task.max_new_tokens,
        num_beams=task.num_beams,
        costs=costs,
        source=source,
        cap_bytes=cap_bytes,
        fixed_rows=task.fixed_rows,
        most_rows=most_rows,
        memory_rows=memory_rows,
        rows_reason=_reason(task, shapes[0].rows, memory_rows),
        prefill_tokens=passes.tokens,
        prefill_reason=passes.reason,
        shapes=shapes,
        total_bytes=peak_bytes + budget.limit_bytes - budget.margin_bytes - cap_bytes,
        fits=peak_bytes <= cap_bytes,
        seconds=None if times is None else seconds(of, costs, times),
        engine=task.engine,
        engine_reason=task.engine_reason,
        notes=notes,
    )


def recut(plan: GenerationPlan, lengths: NDArray[np.int64], costs: CacheCosts, *, cap_bytes: int) -> GenerationPlan:
    """The plan once the device has shown other costs or another cap. Rows that paid still pay."""
    room = replace(plan, costs=costs, cap_bytes=cap_bytes).room()
    before = waves(lengths, plan.room(), response_columns=costs.response_columns)
    now = waves(lengths, room, response_columns=costs.response_columns)
    shapes = _shapes(costs, now, num_rows=len(lengths))
    peak_bytes = max(shape.peak_bytes for shape in shapes)
    beside_bytes = (plan.total_bytes or 0) - max(shape.peak_bytes for shape in plan.shapes)
    factor = len(now.rows) / len(before.rows)
    return replace(
        plan,
        costs=costs,
        cap_bytes=cap_bytes,
        memory_rows=MemoryRoom(costs, cap_bytes=cap_bytes).rows(shapes[0].columns),
        shapes=shapes,
        total_bytes=peak_bytes + beside_bytes,
        fits=peak_bytes <= cap_bytes,
        seconds=None if plan.seconds is None else factor * plan.seconds,
    )


def rows_that_pay(task: GenerationTask, costs: CacheCosts, times: PassTimes, *, cap_bytes: int) -> int:
    """Of the longest prompts, or of those in the middle, of which more fit; and all waves of about as many."""
    room = MemoryRoom(costs, cap_bytes=cap_bytes, most_rows=task.most_rows)
    columns = {tokens + costs.response_columns for tokens in (task.longest, task.median)}
    pay = max(times.rows_that_pay(each, most=room.rows(each)) for each in columns)
    num_rows = len(task.lengths)
    return min(-(-num_rows // max(num_rows // pay, 1)), task.most_rows)


def _shapes(costs: CacheCosts, of: Waves, *, num_rows: int) -> tuple[PlannedRows, ...]:
    """At the start and after each quarter of the rows, those in which something changes. The cache stays the first."""
    cells = int(of.rows[0] * of.columns[0])
    found: dict[tuple[int, int], PlannedRows] = {}
    for part in range(_PARTS):
        first_row = part * num_rows // _PARTS
        rows, columns = of.at(first_row)
        if (rows, columns) not in found:
            peak_bytes = int(np.ceil(costs.peak_bytes(rows, columns, cells=cells)))
            found[rows, columns] = PlannedRows(first_row=first_row, rows=rows, columns=columns, peak_bytes=peak_bytes)
    return tuple(found.values())


def _reason(task: GenerationTask, rows: int, memory_rows: int) -> str:
    if task.alone_reason:
        return task.alone_reason
    if task.fixed_rows is not None:
        return "a number by hand"
    if rows == len(task.lengths):
        return "all rows together"
    if rows == memory_rows:
        return "as many as there is memory for"
    return "with more of them a token of a row takes hardly less time"
