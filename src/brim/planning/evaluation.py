"""Plan how rows are batched for forward passes without gradients: a cap in bytes, memory and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching import Costs, cut_totals
from brim.config.schema import NoTrainer
from brim.memory import UntraceableError
from brim.memory.closed_form import forward_bound
from brim.memory.devices import Budget
from brim.models import LLM
from brim.planning.costs import ForwardPasses, Shape, Traces, enough_tokens, forward_costs
from brim.planning.plan import ForwardPlan, Source, Unplanned
from brim.planning.request import NOT_TRACED, WORTH_TRACING_S, ForwardRequest
from brim.session import Session

_NEARLY_ALL = 0.9  # of the memory: a batch that is predicted to take so much is traced itself


def plan_forward(
    session: Session,
    lengths: ArrayLike,
    *,
    llm: LLM | None = None,
    beside_bytes: int | None = None,
    whole_tokens: int | None = None,
) -> ForwardPlan | Unplanned:
    """Return the plan of passes without gradients over rows of these lengths, in tokens, on the local device.

    lengths: of at least one row. llm: where it is loaded already; on a CPU it has run once. beside_bytes: tensors that
    are not there yet, and will be in the midst of training: the optimizer's state; None: nothing is trained.
    whole_tokens: of batches that are made already, and stay whole where memory allows it; None: as many as make them
    faster.
    """
    config = session.config
    if beside_bytes is None:  # the model is loaded only to be run
        config = config.model_copy(update={"trainer": NoTrainer(chunked_loss=config.trainer.chunked_loss)})
    request = ForwardRequest(
        **ForwardRequest.at_hand(session),
        config=config,
        held_bytes=0 if llm is None else llm.held_bytes,
        lengths=np.asarray(lengths, dtype=np.int64),
        beside_bytes=beside_bytes,
        whole_tokens=whole_tokens,
    )
    job = _Job(request=request, budget=request.budget())
    request.keep_to(job.budget)
    try:
        with request.traces(ForwardPasses) as traces:
            return job.in_closed_form(traces) or job.traced(traces)
    except UntraceableError as error:
        return Unplanned(reason=error.problems[0].what)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    request: ForwardRequest
    budget: Budget

    def in_closed_form(self, traces: Traces) -> ForwardPlan | None:
        """Return None where tracing is worth its time."""
        request = self.request
        bound = forward_bound(request.config, request.folder.config)
        if bound is None:
            return None
        static_bytes = (request.held_bytes or bound.weight_bytes) + (request.beside_bytes or 0)
        costs = bound.scoring(request.lengths, static_bytes=static_bytes, speed=traces.speed)
        usual = int(np.median(request.lengths))
        plan = self._plan(
            costs,
            source="closed form",
            useful_tokens=enough_tokens(lambda tokens: costs.seconds(tokens / usual, usual), traces.speed),
            overhead_bytes=lambda shapes: 0,
            reason=NOT_TRACED,
        )
        return plan if plan.seconds < WORTH_TRACING_S and not plan.num_too_long else None

    def traced(self, traces: Traces) -> ForwardPlan:
        """Return the plan by few traces, and one more where memory decides."""
        costs, useful_tokens = forward_costs(
            traces,
            self.request.lengths,
            cap_bytes=self.budget.reserved_bytes - (self.request.beside_bytes or 0),
            context_length=self.request.folder.context_length,
        )
        plan = self._partitioned(costs, useful_tokens, traces)
        if plan.widest_bytes > _NEARLY_ALL * self.budget.reserved_bytes:
            costs = traces.verified(costs, rows=plan.widest[0], tokens=plan.widest[1])
            plan = self._partitioned(costs, useful_tokens, traces)
        return plan

    def _partitioned(self, costs: Costs, useful_tokens: int, traces: Traces) -> ForwardPlan:
        reason = f"batches of more than {useful_tokens:,} tokens would be less than 1% faster"
        if self.request.whole_tokens is not None:
            reason = f"{self.request.whole_tokens:,} tokens where memory allows it"
        return self._plan(
            costs.beside(self.request.beside_bytes or 0),
            source="traced",
            useful_tokens=useful_tokens,
            overhead_bytes=traces.overhead_of,
            reason=reason,
        )

    def _plan(self, costs: Costs, *, useful_tokens: int, **how: Any) -> ForwardPlan:
        """Return the plan under the job's budget. how: see forward_plan."""
        return forward_plan(
            self.request.lengths,
            costs=costs,
            budget=self.budget,
            useful_tokens=self.request.whole_tokens or useful_tokens,
            largest=self.request.whole_tokens is not None,
            **how,
        )


# Rows are taken in the order of their lengths, so many at a time: of a million rows, those of a window differ in
# length by a thousandth of the spread, and partitioning them takes some ten milliseconds.
WINDOW_ROWS = 4096


_MOST_ROUNDS = 3  # the allocator's overhead depends on the shapes, which depend on the cap, which depends on it


_MOST_HELD = 1.5  # times what is allocated: PyTorch's allocator does not come to hold more


def forward_plan(
    lengths: ArrayLike,
    *,
    costs: Costs,
    source: Source,
    budget: Budget,
    useful_tokens: int,
    overhead_bytes: Callable[[Sequence[Shape]], int],
    reason: str,
    largest: bool = False,
) -> ForwardPlan:
    """Return the partition under the lower of what memory allows and what is useful.

    lengths: tokens of each of at least one row. useful_tokens: of a batch; larger ones are no faster. overhead_bytes:
    what PyTorch's allocator holds beyond what is allocated, with these shapes. largest: see ForwardPlan.
    """
    tokens = -np.sort(-np.asarray(lengths, dtype=np.int64))
    room_bytes = budget.reserved_bytes
    cap_bytes = min(bytes_of_useful(costs, tokens, useful_tokens), room_bytes)
    partition = partial(cut_totals, tokens, WINDOW_ROWS, costs=costs, largest=largest, lone_rows_may_exceed=True)
    for _ in range(_MOST_ROUNDS):
        totals, beyond_bytes = partition(cap_bytes=cap_bytes), 0
        if _MOST_HELD * totals.widest.peak_bytes <= room_bytes:
            break
        beyond_bytes = overhead_bytes([(shape.rows, shape.padded_length) for shape in totals.shapes])
        if min(cap_bytes, totals.widest.peak_bytes) + beyond_bytes <= room_bytes:
            break
        cap_bytes = room_bytes - beyond_bytes
    else:
        totals = partition(cap_bytes=cap_bytes)
    widest = totals.widest
    return ForwardPlan(
        budget=budget,
        costs=costs,
        source=source,
        cap_bytes=cap_bytes,
        widest=(widest.rows, widest.padded_length),
        widest_bytes=widest.peak_bytes,
        total_bytes=widest.peak_bytes + beyond_bytes + budget.outside_bytes,
        num_batches=totals.num_micro_batches,
        padding=totals.padded_tokens / totals.real_tokens,
        seconds=totals.seconds,
        num_too_long=int(np.count_nonzero(costs.peak_bytes(1, tokens) > room_bytes)),
        reason=reason,
        largest=largest,
    )


def bytes_of_useful(costs: Costs, lengths: NDArray[np.int64], useful_tokens: int) -> int:
    """Return the cap with which no batch has more tokens; the longest row fits under it alone."""
    distinct = np.unique(lengths)
    rows = np.maximum(useful_tokens // distinct, 1)
    return int(np.ceil(costs.peak_bytes(rows, distinct).max()))
