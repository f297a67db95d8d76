"""Plan one job of generation from a configuration, a device and the lengths of prompts.

The plan is made by an upper bound in closed form, or traced where that pays. The job is modelled in waves: as many of
the longest prompts as fit, until all their responses are as long as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, Problem
from brim.infer.engines import (
    CacheCosts,
    FixedRoom,
    MemoryRoom,
    Room,
    SlotsEngine,
    generation_settings,
    usual_pass_tokens,
)
from brim.memory import Asked, UntraceableError
from brim.memory.closed_form import forward_bound
from brim.memory.devices import Budget
from brim.models import LLM
from brim.notes import Say
from brim.planning.costs import CacheModel, Correction, PassTimes, SlotsGeneration, StaticGeneration, Traces
from brim.planning.plan import GenerationPlan, PlannedRows, Source, summarize_lengths
from brim.planning.request import NOT_TRACED, WORTH_TRACING_S, GenerationRequest, Request
from brim.session import Session

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNTRACED_ROWS = 8  # where nothing is known: a step of eight rows reads the weights once, not eight times


_USUAL_PASS = "the usual number, since nothing was traced"


_SETTLED = 2  # rounds: the allocator's overhead depends on the shapes, which depend on the cap, which depends on it


_GROWING = (0.7, 0.85)  # of a cache's columns: the allocator sees windows grow


def generation_request(
    session: Session,
    lengths: ArrayLike,
    *,
    llm: LLM | None = None,
    beside_bytes: int = 0,
    fixed_rows: int | None = None,
    asked: Asked | None = None,
    is_at_hand: bool = True,
    num_members: int = 1,
) -> GenerationRequest:
    """Return the request of a job that is about to start here, or, with `asked`, of one on the device that it names.

    lengths: tokens of the prompts. beside_bytes: held beside the model. fixed_rows: None: as the trainer says.
    num_members: processes among which the prompts are dealt by length; the request is of the first one's.
    Raises ConfigError where brim's own engine is asked for and cannot do it.
    """
    if asked is None:
        where = Request.at_hand(session)
    else:
        where = {"folder": session.folder, "architecture": asked.architecture, "device": asked.device}
        where["is_at_hand"] = is_at_hand
    engine, reason = _engine(session.config, where["architecture"])
    request = GenerationRequest(
        **where,
        config=session.config,
        lengths=-np.sort(-np.asarray(lengths, dtype=np.int64))[::num_members],
        fixed_rows=rows_by_hand(session.config) if fixed_rows is None else fixed_rows,
        held_bytes=0 if llm is None else llm.held_bytes + beside_bytes,
        beside_bytes=beside_bytes,
        engine=engine,
        engine_reason=reason,
        num_members=num_members,
    )
    return request.settled() if request.is_slots else request


def cannot(engine: str, why: str) -> Problem:
    """Return the problem of an engine that was asked for and does not do what the other keys ask."""
    return Problem(
        what=f"generation.engine is {engine}, and {why}", where="generation.engine", fix="set generation.engine: auto"
    )


def _engine(config: Config, architecture: PretrainedConfig) -> tuple[str, str]:
    """Return which engine a plan is for, and why."""
    asked = config.generation.engine
    if asked in ("static", "vllm"):
        return asked, "generation.engine"
    settings = generation_settings(config.generation, pad_id=0, end_ids=[0])
    against = SlotsEngine.why_not(architecture, settings)
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    return ("static", against) if against else ("slots", _USUAL if asked == "auto" else "generation.engine")


_USUAL = "the configuration needs no other"


def rows_by_hand(config: Config) -> int | None:
    """Return the rows that run together as the trainer's section says; None: by the memory."""
    trainer = config.trainer
    given = trainer.eval_batch_size if isinstance(trainer, FinetuneTrainer) else trainer.batch_size
    return given if isinstance(given, int) else None


def plan_job(request: GenerationRequest, *, say: Say) -> GenerationPlan:
    """Return the plan of a job, by what earlier ones have traced or measured of the same model and device.

    Where the number of rows is given, it says what it would have taken.
    """
    free = _planned(replace(request, fixed_rows=None), say)
    if request.fixed_rows is None:
        return free
    return replace(_planned(request, say), would_take=free.rows, would_take_reason=free.rows_reason)


def _planned(request: GenerationRequest, say: Say) -> GenerationPlan:
    request, correction = request.corrected(say=say)
    job = _Job(request=request, budget=request.budget(), correction=correction)
    try:
        with request.traces(SlotsGeneration if request.is_slots else StaticGeneration) as traces:
            plan = job.in_closed_form(traces) or job.traced(traces)
    except UntraceableError as error:
        return job.untraced(error.problems[0].what)
    if traces.note is not None:
        say(traces.note)
    return plan


@dataclass(frozen=True, kw_only=True)
class _Job:
    request: GenerationRequest
    budget: Budget
    correction: Correction

    def in_closed_form(self, traces: Traces) -> GenerationPlan | None:
        """Return None where tracing is worth its time."""
        request, is_slots = self.request, self.request.is_slots
        bound = forward_bound(request.config, request.folder.config)
        if bound is None or not request.is_at_hand:
            return None
        costs = bound.generation(
            request.lengths,
            static_bytes=request.held_bytes or bound.weight_bytes + request.beside_bytes,
            prefill_tokens=self._usual_pass_tokens,
            is_slots=is_slots,
        )
        costs = replace(costs, is_packed=self._is_packed).with_passes_of(costs.prefill_tokens, longest=request.longest)
        cap_bytes = self.budget.reserved_bytes
        plan = cut(request, self.budget, costs, _USUAL_PASS, source="closed form", cap_bytes=cap_bytes, times=None)
        time_s = bound.generation_s(request.lengths, costs, traces.speed, rows=plan.rows, is_slots=is_slots)
        # Of `generate` a trace takes up to a minute: there, fewer rows by the bound are enough where the job is short.
        is_enough = plan.is_ample or (not is_slots and plan.fits)
        if time_s >= WORTH_TRACING_S or not is_enough:
            return None
        return replace(plan, seconds=time_s, notes=(NOT_TRACED,))

    def traced(self, traces: Traces) -> GenerationPlan:
        """Return the plan by few traces, and one more where memory decides."""
        request, scale = self.request, self.correction.scale
        model = CacheModel.of(
            traces,
            request.lengths,
            max_new_tokens=request.max_new_tokens,
            most_rows=request.most_rows,
            cap_bytes=round(self.budget.reserved_bytes / max(scale, 1.0)),
            context_length=request.folder.context_length,
        )
        static_bytes = model.costs.static_bytes + request.beside_bytes
        plan = self._settled(replace(model, costs=replace(model.costs, scale=scale, static_bytes=static_bytes)))
        traces.save()
        if model.load_peak_bytes > plan.cap_bytes:
            return replace(plan, fits=False, notes=(*plan.notes, "the weights do not fit while they are loaded"))
        return plan

    def untraced(self, why: str) -> GenerationPlan:
        """Return a plan by which so many rows are tried, and fewer once memory runs out."""
        request = self.request
        rows = max(_UNTRACED_ROWS // request.config.generation.num_beams, 1)
        rows = min(request.fixed_rows or rows, request.most_rows)
        columns = request.longest + request.max_new_tokens - 1
        return _plan(
            request,
            budget=self.budget,
            costs=None,
            source="none",
            cap_bytes=self.budget.reserved_bytes,
            most_rows=rows,
            memory_rows=None,
            rows_reason=f"{why}; fewer once memory runs out",
            prefill_tokens=self._usual_pass_tokens,
            prefill_reason=_USUAL_PASS,
            shapes=(PlannedRows(first_row=0, rows=rows, columns=columns, peak_bytes=0),),
            total_bytes=None,
            fits=True,
            seconds=None,
        )

    @property
    def _is_packed(self) -> bool:
        return self.request.is_slots and self.request.multiple > 1

    @property
    def _usual_pass_tokens(self) -> int:
        return usual_pass_tokens(is_packed=self._is_packed, is_cuda=not self.request.device.is_cpu)

    def _settled(self, model: CacheModel) -> GenerationPlan:
        """Return the plan under a cap that leaves the allocator what it needs for this very plan."""
        request, cap_bytes = self.request, self.budget.reserved_bytes
        for _ in range(_SETTLED):
            model, reason = model.with_passes(cap_bytes=cap_bytes, longest=request.longest, usual=request.median)
            plan = self._cut(model, reason, cap_bytes)
            if plan.rows == plan.memory_rows:
                model = model.verified(plan.shapes[0].cache_shape(model.costs))
                plan = self._cut(model, reason, cap_bytes)
            left_bytes = self.budget.reserved_bytes - model.traces.overhead_bytes(_seen(model.costs, plan.shapes))
            if left_bytes >= cap_bytes:
                break
            cap_bytes = left_bytes
            plan = self._cut(model, reason, cap_bytes)
        return plan

    def _cut(self, model: CacheModel, prefill_reason: str, cap_bytes: int) -> GenerationPlan:
        scale, reason = self.correction.scale, self.correction.reason
        return cut(
            self.request,
            self.budget,
            model.costs,
            prefill_reason,
            source="traced",
            cap_bytes=cap_bytes,
            times=model.times,
            notes=(f"what rows add to the memory is corrected by what was {reason}",) if scale != 1 else (),
        )


def _seen(costs: CacheCosts, shapes: Sequence[PlannedRows]) -> list[tuple[int, ...]]:
    """Return the job's shapes as the allocator sees them: windows grow, and prompts become shorter."""
    first = shapes[0].cache_shape(costs)
    columns = [max(round(share * first.columns), first.prompt_tokens) for share in _GROWING]
    growing = [replace(first, columns=each) for each in columns]
    return [astuple(each) for each in (*growing, first, *(shape.cache_shape(costs) for shape in shapes[1:][-1:]))]


# The job in waves

_PARTS = 4  # of the job, of each of which the plan shows the first rows


def cut(
    task: GenerationRequest,
    budget: Budget,
    costs: CacheCosts,
    prefill_reason: str,
    *,
    source: Source,
    cap_bytes: int,
    times: PassTimes | None,
    notes: tuple[str, ...] = (),
) -> GenerationPlan:
    """Return the plan under a cap. times: None: it is not known which rows pay, and all are taken that fit."""
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
    return _plan(
        task,
        budget=budget,
        costs=costs,
        source=source,
        cap_bytes=cap_bytes,
        most_rows=most_rows,
        memory_rows=memory_rows,
        rows_reason=_reason(task, shapes[0].rows, memory_rows),
        prefill_tokens=costs.prefill_tokens,
        prefill_reason=prefill_reason,
        shapes=shapes,
        total_bytes=peak_bytes + budget.limit_bytes - budget.margin_bytes - cap_bytes,
        fits=peak_bytes <= cap_bytes,
        seconds=None if times is None else seconds(of, costs, times),
        notes=notes,
    )


def _plan(request: GenerationRequest, **found: Any) -> GenerationPlan:
    """Return the plan with what is found, beside what is asked for."""
    return GenerationPlan(
        prompts=summarize_lengths(request.lengths),
        max_new_tokens=request.max_new_tokens,
        num_beams=request.config.generation.num_beams,
        fixed_rows=request.fixed_rows,
        engine=request.engine,
        engine_reason=request.engine_reason,
        num_members=request.num_members,
        **found,
    )


def recut(plan: GenerationPlan, lengths: NDArray[np.int64], costs: CacheCosts, *, cap_bytes: int) -> GenerationPlan:
    """Return the plan once the device has shown other costs or another cap. Rows that paid still pay."""
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


def rows_that_pay(task: GenerationRequest, costs: CacheCosts, times: PassTimes, *, cap_bytes: int) -> int:
    """Return the rows of the longest prompts, or of those in the middle, of which more fit: all waves are alike."""
    room = MemoryRoom(costs, cap_bytes=cap_bytes, most_rows=task.most_rows)
    columns = {tokens + costs.response_columns for tokens in (task.longest, task.median)}
    pay = max(times.rows_that_pay(each, most=room.rows(each)) for each in columns)
    num_rows = len(task.lengths)
    return min(-(-num_rows // max(num_rows // pay, 1)), task.most_rows)


def _shapes(costs: CacheCosts, of: Waves, *, num_rows: int) -> tuple[PlannedRows, ...]:
    """Return the shapes at the start and after each quarter of the rows where something changes; the cache stays."""
    cells = int(of.rows[0] * of.columns[0])
    found: dict[tuple[int, int], PlannedRows] = {}
    for part in range(_PARTS):
        first_row = part * num_rows // _PARTS
        rows, columns = of.at(first_row)
        if (rows, columns) not in found:
            peak_bytes = int(np.ceil(costs.peak_bytes(rows, columns, cells=cells)))
            found[rows, columns] = PlannedRows(first_row=first_row, rows=rows, columns=columns, peak_bytes=peak_bytes)
    return tuple(found.values())


def _reason(task: GenerationRequest, rows: int, memory_rows: int) -> str:
    if task.alone_reason:
        return task.alone_reason
    if task.fixed_rows is not None:
        return "as configured"
    if rows == len(task.lengths):
        return "all rows together"
    if rows == memory_rows:
        return "as many as there is memory for"
    return "more rows would hardly save time"


_COLUMNS_LOOKED_AT = 5  # of a wave's steps, from the first to the last; in between, times are nearly straight


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """Hold W waves, the longest prompts first; each field is [W]."""

    first: NDArray[np.int64]  # position of its first row among the rows by length
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]  # that its longest row needs

    def at(self, position: int) -> tuple[int, int]:
        """Return rows and columns of the wave in which the row at this position is."""
        number = int(np.searchsorted(self.first, position, side="right")) - 1
        return int(self.rows[number]), int(self.columns[number])


def waves(lengths: NDArray[np.int64], room: Room, *, response_columns: int) -> Waves:
    """Return the waves of prompts of these lengths, the longest first. The cache of the first wave is that of all."""
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
    """Return the seconds of a job whose responses are all as long as they may be, so that waves end as a whole."""
    longest = np.maximum(of.columns - costs.response_columns, 1)
    together = np.minimum(of.rows, np.maximum(costs.prefill_tokens // longest, 1))
    passes = -(-of.rows // together)
    prefill_s = float((passes * times.prefill_s(together * longest, longest)).sum())
    if costs.response_columns == 0:
        return prefill_s
    shares = np.linspace(0.0, 1.0, _COLUMNS_LOOKED_AT)
    a_step_s = np.mean([times.step_s(of.rows, longest + share * costs.response_columns) for share in shares], axis=0)
    return prefill_s + costs.response_columns * float(a_step_s.sum())
