"""Plan a run whose layout of rows or whose sizes are open, and so wait for the plan.

On a CPU rows are packed where that is estimated to be faster. No clock decides it: the same run has the same layout,
and is known before it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from brim.config import Choice
from brim.notes import Say
from brim.planning.candidates import WORTH
from brim.planning.request import LAYOUT_KEY, PlanRequest
from brim.planning.training import Planned, laid_out, planned, work_facts
from brim.storage import Cache, cache_folder, digest
from brim.units import format_seconds

_FIRST_ROWS = 64


def plan_run(request: PlanRequest, *, every_way: bool, replan: bool, say: Say) -> Planned:
    """Return the plan that an earlier run made for the same work, or a new one.

    every_way: look also at strategies that cannot be better than the chosen one, to show what they would cost.
    Raises ConfigError where the effective batch moves as it cannot.
    """
    if request.leaves_layout_open:
        return _in_faster_layout(request, every_way=every_way, replan=replan, say=say)
    if request.is_bounded_by_memory:
        found = _bounded_by_memory(request, replan=replan, say=say)
        found.request.require_phases()
        if not every_way:
            return found
        request = found.request
    request.require_phases()
    return planned(request, every_way=every_way, replan=replan, say=say)


def _bounded_by_memory(request: PlanRequest, *, replan: bool, say: Say) -> Planned:
    """Return the plan of sizes that fit at once in the very strategy that is chosen for them.

    Smaller sizes may be faster in a strategy that takes more memory, in which fewer rows fit: the bound falls until it
    is that of its own plan, once a strategy at most. A batch that memory is to size is planned for some rows first:
    partitioning all rows at once would take long.
    """
    found, bound, most = request, None, len(request.rows)
    if request.is_sized_by_memory:
        most = request.length.schedule.final_size
        first = min(most, _FIRST_ROWS)
        found, bound = request.bounded(first), first if first == most else None
    while True:
        at = planned(found, every_way=False, replan=replan, say=say)
        fits = min(found.largest_batch(at.plan), most)
        if bound is not None and fits >= bound:
            return at
        found, bound = request.bounded(fits), fits


# To trace packed rows, too, takes some three seconds, once a model; a tenth of such a run is a second.
_LEAST_RUN_S = 10.0


_SHORT = f"on a CPU rows are packed in runs of {_LEAST_RUN_S:g} s or more that gain by it; true packs them"


_BOUNDED = "on a CPU rows are padded where the memory decides how many an update has; true packs them"


def _in_faster_layout(request: PlanRequest, *, every_way: bool, replan: bool, say: Say) -> Planned:
    """Plan in the layout that was chosen before for the same work; else in the faster one, which is kept.

    What a run measures makes later estimates of one layout other than those of both, so that only what is kept lets a
    run that is begun again have its layout.
    """
    plan = partial(plan_run, every_way=every_way, replan=replan, say=say)
    if request.is_bounded_by_memory:
        return _chosen(plan(request.in_layout(is_packed=False)), reason=_BOUNDED)
    cache, name = Cache(cache_folder(), "layouts"), digest(work_facts(request))
    kept = None if replan else cache.read(name, _parsed)
    if kept is not None:
        is_packed, reason = kept
        found = plan(request.in_layout(is_packed=is_packed))
        if found.plan.chosen is not None or not is_packed:
            return _chosen(found, reason=reason)
    padded = plan(request.in_layout(is_packed=False))
    if padded.plan.chosen is None or padded.plan.least_seconds < _LEAST_RUN_S:
        return _chosen(padded, reason=_SHORT)
    found, reason = _faster(padded, request, plan)
    cache.write(name, {"is_packed": found.plan.is_packed, "reason": reason})
    if cache.note is not None:
        say(cache.note)
    return _chosen(found, reason=reason)


def _parsed(saved: Any) -> tuple[bool, str]:
    return saved["is_packed"] is True, str(saved["reason"])


def _chosen(found: Planned, *, reason: str) -> Planned:
    choice = Choice(key=LAYOUT_KEY, value=found.request.trainer.packing is True, reason=reason)
    return replace(found, choices=(choice, *found.choices))


def _faster(padded: Planned, request: PlanRequest, plan: Callable[[PlanRequest], Planned]) -> tuple[Planned, str]:
    """Return the plan of packed rows where it is faster than that of padded ones; and why.

    The cut alone must be faster by enough, with the costs of padded rows. Those of packed ones, which count a call of
    attention for each row, are traced only then.
    """
    chosen, costs, task = padded.plan.chosen, padded.plan.costs, padded.request.task
    assert chosen is not None, "it fits"
    assert costs is not None, "it fits"
    packed = request.in_layout(is_packed=True)
    for choice in packed.execution_choices():
        if choice.key == LAYOUT_KEY:
            return padded, choice.reason
    alike = laid_out(packed, costs)
    if alike.peak_bytes(1, task.longest) > chosen.cap_bytes:
        return padded, "the longest row does not fit once it is filled up"
    padded_s, packed_s = (task.epoch(each, cap_bytes=chosen.cap_bytes).seconds for each in (costs, alike))
    if packed_s > padded_s * (1 - WORTH):
        return padded, _compared(packed_s, padded_s)
    found = plan(packed)
    if found.plan.chosen is None:
        return padded, f"packed rows do not fit: {found.plan.reason}"
    packed_s, padded_s = found.plan.chosen.seconds_per_epoch or 0.0, chosen.seconds_per_epoch or 0.0
    return (found if packed_s < padded_s else padded), _compared(packed_s, padded_s)


def _compared(packed_s: float, padded_s: float) -> str:
    return (
        f"on a CPU an epoch is estimated at {format_seconds(packed_s)} packed, {format_seconds(padded_s)} padded: "
        f"{abs(packed_s / padded_s - 1):.1%} {'less' if packed_s < padded_s else 'more'}"
    )
