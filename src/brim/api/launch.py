"""A plan brought to the device: the micro-batch that takes the most is tried once, and the cut follows from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from brim.api.calibrating import corrected
from brim.api.plan_request import PlanRequest
from brim.api.session import Say
from brim.batching.ballast import gradients_at_hand, standing_for
from brim.batching.by_length import ByLength
from brim.batching.by_rows import ByRows
from brim.batching.costs import Costs
from brim.batching.cutter import Cutter
from brim.batching.finder import Search, find_batch_size
from brim.batching.microbatch import MicroBatch
from brim.batching.no_trace import no_trace
from brim.batching.peak_meter import Counts, peak_meter
from brim.batching.probe import Probe
from brim.batching.prober import Prober
from brim.batching.totals import Shape
from brim.errors import OutOfMemoryError, Problem
from brim.models.llm import LLM
from brim.planning.at_hand import enforce
from brim.planning.candidates import cut_anew, epoch
from brim.planning.plan import Candidate, TimeSource, TrainingPlan
from brim.planning.probe_rows import rows_of_shape
from brim.planning.time_fit import fit_time
from brim.planning.time_probe import time_shapes
from brim.planning.time_shapes import shapes_to_time
from brim.train.micro_batch_pass import MicroBatchPass
from brim.units import format_bytes

_AMPLE = 0.5  # of the budget: below it a plan is not tried first, since no prediction is off by so much


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How the run will cut its batches, and what was tried."""

    cutter: Cutter
    plan: TrainingPlan | None  # as it is after what was tried
    probes: tuple[Probe, ...]
    measured: tuple[tuple[int, Probe], ...] = ()  # the bytes that were predicted of a probe, and the probe
    told: str  # one line; empty where nothing is to be told


def launch(plan: TrainingPlan | None, request: PlanRequest, llm: LLM, *, pad_id: int, say: Say) -> Launched:
    """Prove the plan on the device at hand. Weights, gradients, random states and caches are left as they were.

    plan: None where the architecture cannot be traced: then sizes are tried out.
    Raises OutOfMemoryError when a row alone runs out of memory.
    """
    if plan is not None and request.config.memory.budget != "auto":
        enforce(plan.budget, request.device)
    trial = _Trial(request, llm, pad_id, state_bytes=0 if plan is None else plan.state_bytes)
    trainer, costs = request.trainer, None if plan is None else plan.costs
    if trainer.batch_size != "auto":
        assert request.task.fixed_rows is not None, "as the configuration says"
        return Launched(cutter=ByRows(max_rows=request.task.fixed_rows), plan=plan, probes=(), told="")
    if plan is None or costs is None or trainer.batch_search != "predict":
        how: Search = "doubling" if trainer.batch_search == "predict" else trainer.batch_search
        return _searched(how, plan, request, trial)
    return _proven(plan, costs, request, trial, say)


def _proven(plan: TrainingPlan, costs: Costs, request: PlanRequest, trial: _Trial, say: Say) -> Launched:
    """The widest micro-batch of the plan is tried, and where it runs out of memory that of a lower cap; then timed."""
    assert plan.chosen is not None, "it has costs"
    cap_bytes = plan.chosen.cap_bytes
    probes: list[Probe] = []
    measured: list[tuple[int, Probe]] = []
    while probes or not _is_ample(plan):
        widest = epoch(request.task, costs, cap_bytes=cap_bytes).widest
        probes.append(trial.probe(widest.rows, widest.padded_length))
        if probes[-1].outcome == "fits":
            measured.append((widest.peak_bytes, probes[-1]))
            costs = corrected(costs, probes[-1], widest.peak_bytes)
            break
        cap_bytes = _lowered(costs, cap_bytes, widest)
        say(
            f"{widest.rows:,} × {widest.padded_length:,} tokens ran out of memory when they were tried: "
            f"micro-batches are cut to {format_bytes(cap_bytes)}"
        )
    timed, told_time = _timed(plan, costs, cap_bytes, request, trial)
    source: TimeSource = plan.chosen.time_source if timed is None else "measured"
    assert plan.costs is not None, "they were given"
    chosen = cut_anew(plan.chosen, request.task, plan.costs, timed or costs, cap_bytes=cap_bytes)
    plan = replace(plan, chosen=replace(chosen, time_source=source), costs=timed or costs)
    return Launched(
        cutter=ByLength(costs=timed or costs, cap_bytes=cap_bytes, largest=request.task.largest),
        plan=plan,
        probes=tuple(probes),
        measured=tuple(measured),
        told=f"{_tried_shape(probes, chosen)}; {told_time}",
    )


def _timed(
    plan: TrainingPlan, costs: Costs, cap_bytes: int, request: PlanRequest, trial: _Trial
) -> tuple[Costs | None, str]:
    """The costs with measured times, None where the estimate or an earlier measurement stays; and what to tell."""
    assert plan.chosen is not None, "it has costs"
    if plan.chosen.time_source == "measured":
        return None, "timed by an earlier run"
    task = request.task
    timing = shapes_to_time(
        task.lengths,
        costs=costs,
        cap_bytes=cap_bytes,
        most_rows=task.effective_batch_size,
        run_s=plan.seconds or 0.0,
    )
    if not timing.shapes:
        return None, f"time {timing.reason}"
    samples = time_shapes(timing, trial.run_shape, trial.clock, predicted=costs.time)
    fit = fit_time(samples, costs.time)
    seconds = fit.surface(shortest=int(task.lengths.min()), longest=task.longest, most_rows=task.effective_batch_size)
    told = f"timed {len(samples)} shapes of micro-batches, the model is off by {fit.relative_error:.0%}"
    return replace(costs, time=seconds), told


def _tried_shape(probes: Sequence[Probe], chosen: Candidate) -> str:
    if not probes:
        return f"not tried before the first step, since it needs less than {_AMPLE:.0%} of the memory"
    assert chosen.widest is not None, "it fits"
    rows, tokens = chosen.widest
    return f"{rows:,} × {tokens:,} tokens ran and fitted ({_tried(probes)})"


def _is_ample(plan: TrainingPlan) -> bool:
    assert plan.chosen is not None, "asked of plans that fit"
    return (plan.chosen.total_bytes or 0) <= _AMPLE * plan.budget.limit_bytes


def _lowered(costs: Costs, cap_bytes: int, failed: Shape) -> int:
    """As within a run; but the run begins with it, and is not to rise above it."""
    cutter = ByLength(costs=costs, cap_bytes=cap_bytes)
    micro_batch = MicroBatch(
        rows=np.arange(failed.rows), padded_length=failed.padded_length, peak_bytes=failed.peak_bytes
    )
    if cutter.lower(micro_batch) is None:
        raise OutOfMemoryError(
            Problem(
                what=f"a row of {failed.padded_length:,} tokens ran out of memory alone, when it was tried before the "
                f"first step; it was predicted to take {format_bytes(failed.peak_bytes)}",
                fix="`brim plan` shows what would help; is something else on the device?",
            )
        )
    return cutter.cap_bytes


def _searched(how: Search, plan: TrainingPlan | None, request: PlanRequest, trial: _Trial) -> Launched:
    """The most of the longest rows that run together; without a memory model, of any rows."""
    task = request.task
    found = find_batch_size(
        lambda size: trial.probe_size(size, task.longest),
        how=how,
        most=task.effective_batch_size,
        limit_bytes=trial.limit_bytes,
    )
    told = f"{how}: {found.size} of the longest rows, {task.longest:,} tokens, fit together; {_tried(found.probes)}"
    if plan is None or plan.costs is None:
        return Launched(cutter=ByRows(max_rows=found.size), plan=plan, probes=found.probes, told=told)
    costs = plan.costs
    cap_bytes = int(np.ceil(costs.peak_bytes(found.size, task.longest)))
    cutter = ByLength(costs=costs, cap_bytes=cap_bytes, largest=task.largest)
    return Launched(cutter=cutter, plan=plan, probes=found.probes, told=told)


def _tried(probes: Sequence[Probe]) -> str:
    number = len(probes)
    failed = sum(probe.outcome != "fits" for probe in probes)
    return f"{number} probe{'s' * (number != 1)}" + (f", {failed} of them out of memory" if failed else "")


class _Trial:
    """Micro-batches of real rows as in the midst of a step: gradients at hand, ballast for the optimizer's state."""

    def __init__(self, request: PlanRequest, llm: LLM, pad_id: int, *, state_bytes: int) -> None:
        self._lengths, self._num_supervised = request.rows.lengths, request.rows.num_supervised
        self._llm, self._state_bytes = llm, state_bytes
        self._pass = MicroBatchPass(
            model=llm.model,
            head=llm.head,
            rows=request.rows,
            pad_id=pad_id,
            device=llm.device,
            precision=llm.precision,
            scaler=torch.amp.GradScaler(llm.device.type, enabled=False),
            row_dropout=llm.row_dropout,
        )

    def probe(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is in bytes allocated, as a plan counts them."""
        device = self._llm.device
        if device.type == "cuda":
            return self._prober(tokens, counts="allocated")(rows)
        meter = peak_meter(device)
        meter.begin()
        before_bytes = meter.peak_bytes()
        probe = self._prober(tokens)(rows)
        if probe.peak_bytes is None or before_bytes is None:
            return replace(probe, peak_bytes=None)
        return replace(probe, peak_bytes=probe.peak_bytes - before_bytes + _held_bytes(self._llm.model))

    def probe_size(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is as the device counts it: what PyTorch reserved, or this process's memory."""
        return self._prober(tokens)(rows)

    def run_shape(self, rows: int, tokens: int) -> None:
        """Run a shape that is known to fit."""
        with no_trace(self._llm.model):
            self._forward_backward(rows_of_shape(self._lengths, rows=rows, tokens=tokens))

    def clock(self) -> float:
        """Seconds, once the device has done what was asked of it."""
        if self._llm.device.type == "cuda":
            torch.cuda.synchronize(self._llm.device)
        return time.perf_counter()

    @property
    def limit_bytes(self) -> int | None:
        """What a peak may reach, as it is measured."""
        return self._prober(2).limit_bytes

    def _prober(self, tokens: int, *, counts: Counts = "reserved") -> Prober:
        return Prober(
            lambda size: self._in_midst_of_step(rows_of_shape(self._lengths, rows=size, tokens=tokens)),
            model=self._llm.model,
            device=self._llm.device,
            num_steps=1,
            counts=counts,
        )

    def _in_midst_of_step(self, rows: NDArray[np.intp]) -> None:
        with ExitStack() as stack:
            stack.enter_context(gradients_at_hand(self._llm.model.parameters()))
            if self._state_bytes:
                stack.enter_context(standing_for(self._state_bytes, self._llm.device))
            self._forward_backward(rows)

    def _forward_backward(self, rows: NDArray[np.intp]) -> None:
        self._llm.model.train()
        self._pass(rows, max(int(self._num_supervised[rows].sum()), 1), step=0)


def _held_bytes(model: nn.Module) -> int:
    """Of weights and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
