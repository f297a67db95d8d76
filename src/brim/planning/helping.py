"""Say what would make rows fit where no strategy does, each with what it would take, and which rows are the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from brim.distributed import sharding_obstacles
from brim.memory import MOST_GPUS, predict_memory, what_helps
from brim.memory.devices import Budget, cpu_device, devices
from brim.planning.candidates import WayCosts, candidate
from brim.planning.plan import Candidate, LongRow, Way
from brim.planning.request import PlanRequest
from brim.train import host_obstacles
from brim.units import format_bytes, format_count


def helps(
    request: PlanRequest, budget: Budget, candidates: Sequence[Candidate], known: Sequence[WayCosts]
) -> tuple[str, ...]:
    """Return what makes it fit; where nothing does alone, what takes less, and that it is not enough."""
    device, task = request.device, request.task
    is_named = not request.is_at_hand or device.is_cpu
    is_known = is_named and any(device.name == each.name for each in (*devices(), cpu_device()))
    where: dict[str, Any] = {
        "device": device.name if is_known else None,
        "memory_bytes": device.memory_bytes if is_named and not is_known else None,
    }
    world_size = request.ranks if True in request.sharded else 1
    found = what_helps(request.config, rows=task.fixed_rows or 1, longest=task.longest, world_size=world_size, **where)
    room_bytes = budget.limit_bytes - budget.margin_bytes
    enough = [str(each) for each in found if each.total_bytes <= room_bytes]
    if request.ranks > 1:
        leanest = min(candidates, key=lambda each: each.single_row_bytes).way
        enough += _sharded_further(request, leanest, room_bytes, beyond=world_size, **where)
    if task.fixed_rows is not None:
        by_length = [candidate(way, replace(task, fixed_rows=None), budget) for way in known]
        least = min((each.total_bytes for each in by_length if each.total_bytes is not None), default=None)
        if least is not None:
            enough.append(f"micro-batches by length ({format_bytes(least)}): trainer.batch_size: auto")
    enough += _offloaded(request, candidates, room_bytes, **where)
    fitting = [each.longest_that_fits for each in candidates if each.longest_that_fits is not None]
    if fitting:
        enough.append(f"rows of {format_count(max(fitting), 'token')}: preprocessing.global_max_sequence_length")
    now_bytes = min(each.single_row_bytes for each in candidates)
    less = (
        each.not_enough(room_bytes) for each in found if task.fixed_rows is not None or each.total_bytes < now_bytes
    )
    return tuple(enough) or (*less, "a smaller model: `brim memory --compare` shows what each strategy takes")


def _offloaded(request: PlanRequest, candidates: Sequence[Candidate], room_bytes: int, **where: Any) -> Iterator[str]:
    """Yield that the longest row would fit with the optimizer or the weights on the host of a GPU, where it would.

    where: the device, as `predict_memory` takes it.
    """
    if request.device.is_cpu or request.offload != "none":
        return
    leanest = min(candidates, key=lambda each: each.single_row_bytes).way
    for offload, obstacles, ranks, what in (
        ("optimizer", host_obstacles, 1, "the optimizer's states and its step on the host"),
        ("weights", sharding_obstacles, request.ranks, "weights, gradients and states on the host, which is slow"),
    ):
        config = request.config.having("memory.offload", offload)
        if any(obstacles(config)):
            continue
        found = predict_memory(
            replace(request, config=config).config_of(leanest),
            phase="train",
            batch_size=request.task.fixed_rows or 1,
            sequence_length=request.task.longest,
            world_size=ranks,
            **where,
        )
        if found.total_bytes <= room_bytes:
            there = f"{format_bytes(found.total_bytes)} of the device and {format_bytes(found.host_bytes)} of the host"
            yield f"{what} ({there}): memory.offload: {offload}"


_TIMES_MORE = (1, 2, 4, 8)  # as many ranks are looked at


def _sharded_further(
    request: PlanRequest, leanest: Way, room_bytes: int, *, beyond: int, **where: Any
) -> Iterator[str]:
    """Yield over how many ranks the longest row would fit, sharded, where it is over any of those looked at.

    beyond: ranks that were looked at already. where: the device, as `predict_memory` takes it.
    """
    for ranks in (times * request.ranks for times in _TIMES_MORE):
        if not beyond < ranks <= MOST_GPUS:
            continue
        found = predict_memory(
            request.config_of(leanest),
            phase="train",
            batch_size=request.task.fixed_rows or 1,
            sequence_length=request.task.longest,
            world_size=ranks,
            **where,
        )
        if found.total_bytes <= room_bytes:
            keys = f"backend: {{trainer: {{strategy: auto, num_workers: {ranks}}}}}"
            yield f"the model sharded over {ranks} processes ({format_bytes(found.total_bytes)} each): {keys}"
            return


def too_long_rows(
    request: PlanRequest, candidates: Sequence[Candidate], known: Sequence[WayCosts]
) -> tuple[LongRow, ...]:
    """Return the rows that do not fit in the strategy that takes the least."""
    least, way = min(zip(candidates, known, strict=True), key=lambda pair: pair[0].single_row_bytes)
    positions = np.sort(request.order[list(least.too_long)])
    lengths = request.rows.lengths[positions]
    peaks = np.maximum(way.costs.peak_bytes(1, lengths), way.least_bytes)
    beside_bytes = least.single_row_bytes - max(
        float(way.costs.peak_bytes(1, request.task.longest)), float(way.least_bytes)
    )
    return tuple(
        LongRow(key=int(key), num_tokens=int(num_tokens), total_bytes=round(peak + beside_bytes))
        for key, num_tokens, peak in zip(request.rows.keys[positions], lengths, peaks.tolist(), strict=True)
    )
