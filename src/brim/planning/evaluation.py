"""Plan how rows are batched for forward passes without gradients: a cap in bytes, memory and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

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
        config = config.model_copy(
            update={"trainer": NoTrainer(chunked_loss=config.trainer.chunked_loss, packing=config.trainer.packing)}
        )
    request = ForwardRequest(
        **ForwardRequest.at_hand(session),
        config=config,
        held_bytes=0 if llm is None else llm.held_bytes,
        lengths=np.asarray(lengths, dtype=np.int64),
        beside_bytes=beside_bytes,
        whole_tokens=whole_tokens,
    )
    request = request.settled()
    budget = request.budget()
    request.keep_to(budget)
    try:
        with request.traces(ForwardPasses) as traces:
            return _in_closed_form(request, budget, traces) or _traced(request, budget, traces)
    except UntraceableError as error:
        return Unplanned(reason=error.problems[0].what)


def _in_closed_form(request: ForwardRequest, budget: Budget, traces: Traces) -> ForwardPlan | None:
    """Return None where tracing is worth its time."""
    bound = forward_bound(request.config, request.folder.config)
    if bound is None:
        return None
    static_bytes = (request.held_bytes or bound.weight_bytes) + (request.beside_bytes or 0)
    costs = bound.scoring(request.lengths, static_bytes=static_bytes, speed=traces.speed)
    costs = replace(costs, multiple=request.multiple)
    usual = int(np.median(request.lengths))
    plan = forward_plan(
        request.lengths,
        costs=costs,
        source="closed form",
        budget=budget,
        useful_tokens=enough_tokens(lambda tokens: costs.seconds(tokens / usual, usual), traces.speed),
        whole_tokens=request.whole_tokens,
        overhead_bytes=lambda shapes: 0,
        reason=NOT_TRACED,
    )
    return plan if plan.seconds < WORTH_TRACING_S and not plan.num_too_long else None


def _traced(request: ForwardRequest, budget: Budget, traces: Traces) -> ForwardPlan:
    """Return the plan by few traces, and one more where memory decides."""
    beside_bytes, whole_tokens = request.beside_bytes or 0, request.whole_tokens
    costs, useful_tokens = forward_costs(
        traces,
        request.lengths,
        cap_bytes=budget.reserved_bytes - beside_bytes,
        context_length=request.folder.context_length,
    )
    costs = replace(costs, multiple=request.multiple)

    def partitioned(costs: Costs) -> ForwardPlan:
        return forward_plan(
            request.lengths,
            costs=costs.beside(beside_bytes),
            source="traced",
            budget=budget,
            useful_tokens=useful_tokens,
            whole_tokens=whole_tokens,
            overhead_bytes=traces.overhead_of,
            reason=f"batches of more than {useful_tokens:,} tokens would be less than 1% faster"
            if whole_tokens is None
            else f"{whole_tokens:,} tokens where memory allows it",
        )

    plan = partitioned(costs)
    if plan.widest_bytes > _NEARLY_ALL * budget.reserved_bytes:
        plan = partitioned(traces.verified(costs, rows=plan.widest[0], tokens=plan.widest[1]))
    return plan


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
    whole_tokens: int | None = None,
) -> ForwardPlan:
    """Return the partition under the lower of what memory allows and what is useful.

    lengths: tokens of each of at least one row. useful_tokens: of a batch; larger ones are no faster. overhead_bytes:
    what PyTorch's allocator holds beyond what is allocated, with these shapes. whole_tokens: see plan_forward.
    """
    tokens = -np.sort(-np.asarray(lengths, dtype=np.int64))
    room_bytes, largest = budget.reserved_bytes, whole_tokens is not None
    distinct = np.unique(tokens)
    most_rows = np.maximum((whole_tokens or useful_tokens) // distinct, 1)  # the longest row stands alone at least
    cap_bytes = min(int(np.ceil(costs.peak_bytes(most_rows, distinct).max())), room_bytes)
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
