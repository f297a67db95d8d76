"""Decide how many rows generate together under a cap, what that takes, and why.

The job is seen in waves: as many of the longest prompts as fit, until all their responses are as long as they may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from brim.infer.engines import MOST_ROWS, CacheCosts, FixedRoom, MemoryRoom, Room
from brim.memory import Budget
from brim.planning.costs import PassTimes, PrefillTokens
from brim.planning.plan import GenerationPlan, PlannedRows, Source, summarize_lengths

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


_COLUMNS_LOOKED_AT = 5  # of a wave's steps, from the first to the last; times lie on straight pieces between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """W waves, the longest prompts first; each [W]."""

    first: NDArray[np.int64]  # position of its first row among the rows by length
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]  # that its longest row needs

    def at(self, position: int) -> tuple[int, int]:
        """Rows and columns of the wave in which the row at this position is."""
        number = int(np.searchsorted(self.first, position, side="right")) - 1
        return int(self.rows[number]), int(self.columns[number])


def waves(lengths: NDArray[np.int64], room: Room, *, response_columns: int) -> Waves:
    """lengths: tokens of the prompts, the longest first. The cache of the first wave is that of all."""
    first, rows, columns = [], [], []
    position = cells = 0
    while position < len(lengths):
        needed = int(lengths[position]) + response_columns
        number = min(room.rows(needed, cells=cells), len(lengths) - position)
        if cells:
            number = min(number, max(cells // needed, 1))
        cells = cells or number * needed
        first.append(position)
        rows.append(number)
        columns.append(needed)
        position += number
    return Waves(first=np.array(first), rows=np.array(rows), columns=np.array(columns))


def seconds(of: Waves, costs: CacheCosts, times: PassTimes) -> float:
    """Where every response is as long as it may be, so that nobody's place becomes free before a wave is over."""
    longest = np.maximum(of.columns - costs.response_columns, 1)
    together = np.minimum(of.rows, np.maximum(costs.prefill_tokens // longest, 1))
    passes = -(-of.rows // together)
    prefill_s = float((passes * times.prefill_s(together * longest, longest)).sum())
    if costs.response_columns == 0:
        return prefill_s
    shares = np.linspace(0.0, 1.0, _COLUMNS_LOOKED_AT)
    a_step_s = np.mean([times.step_s(of.rows, longest + share * costs.response_columns) for share in shares], axis=0)
    return prefill_s + costs.response_columns * float(a_step_s.sum())
