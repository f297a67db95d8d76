"""One way to run, traced: its memory and its time for every shape that the rows can make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from brim.api.memory import ONE_AT_A_TIME, UNTRACEABLE, UntraceableError, is_a_mistake_of_brims, untraceable
from brim.api.plan_request import PlanRequest
from brim.api.session import Say
from brim.batching.costs import Costs
from brim.memory.allocator_settings import AllocatorSettings
from brim.memory.config_workload import ConfigWorkload
from brim.memory.cuda.target import CudaTarget
from brim.memory.device_speed import device_speed
from brim.planning.budget import Budget
from brim.planning.calibration import Correction
from brim.planning.candidates import RowsAndTokens, WayCosts
from brim.planning.memory_model import memory_model, verified
from brim.planning.overhead import overhead_bytes
from brim.planning.plan import Way
from brim.planning.roofline import seconds_of
from brim.planning.time_advice import time_advice
from brim.planning.time_estimate import TimeEstimate, estimate
from brim.planning.traced_shapes import TracedShapes
from brim.planning.work_law import shapes_to_count

_SHORT_PERCENT = 10  # of the rows are shorter than what is taken for short


def traced(
    request: PlanRequest, way: Way, budget: Budget, correction: Correction, *, cache_folder: Path | None, say: Say
) -> WayCosts:
    """Trace the few shapes that it takes. Raises UntraceableError for an architecture that cannot be."""
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=()):
        try:
            return _traced(request, way, budget, correction.scale, cache_folder, say)
        except UNTRACEABLE as error:
            if is_a_mistake_of_brims(error):
                raise
            raise UntraceableError(untraceable(error, request.folder)) from error


def _traced(
    request: PlanRequest, way: Way, budget: Budget, scale: float, cache_folder: Path | None, say: Say
) -> WayCosts:
    shapes = _shapes(request, way, cache_folder)
    task = request.task
    model = memory_model(
        shapes,
        task.lengths,
        most_rows=task.fixed_rows or task.effective_batch_size,
        cap_bytes=round(budget.reserved_bytes / max(scale, 1.0)),
        context_length=request.folder.context_length,
    )
    time = _time(request, shapes)
    update_s = seconds_of(shapes.update_work, time.speed)
    shapes.save()
    if shapes.note is not None:
        say(shapes.note)

    def overhead(of: Sequence[RowsAndTokens]) -> int:
        with ONE_AT_A_TIME:
            return overhead_bytes(shapes, of)

    def traced_at(rows: int, tokens: int) -> Costs:
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=()):
            return replace(costs, peak=verified(model, shapes, rows=rows, tokens=tokens).peak)

    costs = Costs(peak=model.peak, static_bytes=model.static_bytes, time=time.surface, scale=scale)
    return WayCosts(
        way=replace(way, chunked_loss=shapes.basics.chunk_positions is not None),
        costs=costs,
        least_bytes=model.least_bytes,
        state_bytes=model.state_bytes,
        update_s=update_s,
        overhead_bytes=overhead,
        bound_by=lambda of: time.bound(of).bound_by,
        advice=lambda of: time_advice(time, of),
        time_source="estimated",
        traced_at=traced_at,
    )


def _shapes(request: PlanRequest, way: Way, cache_folder: Path | None) -> TracedShapes:
    device = request.device
    target = None if device.is_cpu else CudaTarget(compute_capability=device.capability or (8, 0))
    workload = ConfigWorkload(request.config_of(way), request.folder, request.architecture, target=target)
    return TracedShapes(
        workload,
        device,
        is_single=request.task.effective_batch_size == 1,
        settings=AllocatorSettings.from_environment(os.environ),
        cache_folder=cache_folder,
    )


def _time(request: PlanRequest, shapes: TracedShapes) -> TimeEstimate:
    task = request.task
    short = int(np.percentile(task.lengths, _SHORT_PERCENT, method="inverted_cdf"))
    for rows, tokens in shapes_to_count(
        shapes.known.work, longest=task.longest, short=short, most_rows=task.effective_batch_size
    ):
        shapes.work(rows, tokens)
    return estimate(
        shapes.known.work,
        device_speed(request.device, num_cores=torch.get_num_threads()),
        longest=task.longest,
        shortest=int(task.lengths.min()),
        most_rows=task.effective_batch_size,
    )
