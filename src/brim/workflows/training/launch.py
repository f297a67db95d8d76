"""Bring a plan to the device: try the most demanding micro-batch once, and set the partition by it.

Micro-batches of real rows are tried on the local device as in the middle of a step.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching import ByLength, ByRows, Costs, Cutter, MicroBatch, Shape, by_costs
from brim.batching.memory import (
    AddressSpacePeak,
    Counts,
    Probe,
    Prober,
    Search,
    find_batch_size,
    free_caches,
    gradients_at_hand,
    no_trace,
    peak_meter,
    standing_for,
)
from brim.config.schema import MemoryConfig
from brim.errors import ConfigError, OutOfMemoryError
from brim.memory.closed_form import counted_state_bytes
from brim.memory.devices import Budget, budget_of, cpu_device
from brim.models import LLM
from brim.notes import Note, Say
from brim.planning import Candidate, PlanRequest, TrainingPlan, rows_of_pack, rows_of_shape, training_words
from brim.planning.costs import corrected
from brim.train import MicroBatchPass, Peak
from brim.units import format_bytes, format_count
from brim.workflows.training.timing import TimeFit, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Hold how the run will partition its batches, and what was tried."""

    cutter: Cutter
    request: PlanRequest  # with the effective batch that a search has found, where one was to
    plan: TrainingPlan | None = None  # as it is after what was tried
    probes: tuple[Probe, ...] = ()
    measured: tuple[tuple[int, Probe], ...] = ()  # the bytes that were predicted, uncorrected, and the probe
    told: str = ""  # one line for people; empty for none
    saved: Mapping[str, Any] | None = None  # plan.json's content, where the run continues as it was planned

    @property
    def plan_in_force(self) -> TrainingPlan | None:
        """Return the plan that the run was begun with, where it continues; None where the architecture has none."""
        saved = None if self.saved is None else self.saved["plan"]
        return self.plan if saved is None else TrainingPlan.from_dict(saved)

    @property
    def record(self) -> Mapping[str, Any]:
        """Return what plan.json keeps of it."""
        if self.saved is not None:
            return self.saved
        plan = None if self.plan is None else self.plan.as_dict()
        return {"plan": plan, "launch": {"told": self.told, "probes": [asdict(probe) for probe in self.probes]}}

    def remember(self, steps: Iterable[Peak], device: torch.device) -> None:
        """Record what the steps took, for later plans."""
        if self.plan is None or self.plan.costs is None:
            return
        costs = self.plan.costs
        seen = [(costs.uncorrected(step.predicted_bytes), step.measured_bytes) for step in steps]
        seen += [(predicted_bytes, probe.peak_bytes) for predicted_bytes, probe in self.measured]
        peaks = [(predicted, measured) for predicted, measured in seen if measured is not None]
        outside_bytes = _outside_bytes(device)
        self.request.calibrations.learn(peaks, static_bytes=costs.static_bytes, outside_bytes=outside_bytes)


def room_for_copy(plan: TrainingPlan | None, *, is_cpu: bool, num_processes: int = 1) -> int:
    """Return what a copy of a checkpoint may take of this machine's memory; 0 where the plan does not tell its size.

    is_cpu: training takes that memory, too, in so many processes, each within its share; of GPUs' processes only the
    first copies.
    """
    if plan is None or not plan.saved_bytes:
        return 0
    try:
        host = budget_of(MemoryConfig(), cpu_device().among(num_processes if is_cpu else 1), is_at_hand=True)
    except ConfigError:  # nothing is left
        return 0
    if is_cpu:
        return max(plan.left_bytes - max(plan.budget.limit_bytes - host.limit_bytes, 0), 0)
    return host.reserved_bytes // 2  # PyTorch pins blocks whose sizes are powers of two


def saving_note(plan: TrainingPlan | None, room_bytes: int) -> Note:
    """Say whether training goes on while a checkpoint is written. room_bytes: what `room_for_copy` gave."""
    stands = "training stands still while a checkpoint is written"
    if plan is None or not plan.saved_bytes:
        return Note(f"{stands}: whether a copy of it fits into memory is not known before the run", topic="memory")
    sizes = f"{format_bytes(plan.saved_bytes)} of this machine's memory, {format_bytes(room_bytes)} are free for it"
    if plan.saved_bytes > room_bytes:
        return Note(f"{stands}: a copy of it would take {sizes}", topic="memory")
    told = f"training goes on while a checkpoint is written from a copy, which takes {sizes}"
    return Note(told, kind="detail", topic="memory")


def _outside_bytes(device: torch.device) -> int | None:
    """Return the part of a GPU that is neither free nor PyTorch's: the context, libraries, other processes."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved(device))


def launch(plan: TrainingPlan | None, request: PlanRequest, llm: LLM, *, pad_id: int, say: Say) -> Launched:
    """Prove the plan on the local device. Weights, gradients, random states and caches are left as they were.

    plan: None where the architecture cannot be traced: then sizes are tried out.
    Raises OutOfMemoryError when a row alone runs out of memory.
    """
    state_bytes = counted_state_bytes(request.trainer, llm.model) if plan is None else plan.state_bytes
    trial = Trial(request, llm, pad_id, state_bytes=state_bytes)
    trainer, costs = request.trainer, None if plan is None else plan.costs
    if trainer.batch_size != "auto":
        assert request.task.fixed_rows is not None, "as the configuration says"
        return Launched(cutter=ByRows(max_rows=request.task.fixed_rows), request=request, plan=plan)
    if plan is None or costs is None or trainer.batch_search != "predict":
        how: Search = "linear" if trainer.batch_search == "predict" else trainer.batch_search
        return _searched(how, plan, request, trial)
    return _proven(plan, costs, request, trial, say)


def untried(plan: TrainingPlan | None, request: PlanRequest) -> Launched:
    """Take the plan as it was predicted. Raises ConfigError where nothing is predicted of a size that is left open."""
    if request.task.fixed_rows is not None:
        return Launched(cutter=ByRows(max_rows=request.task.fixed_rows), request=request, plan=plan)
    if plan is None or plan.costs is None or plan.chosen is None:
        raise ConfigError(
            what="the memory of this architecture cannot be predicted, and what is sharded is not tried out",
            where="trainer.batch_size",
            fix="set it to a number of rows",
        )
    cutter = by_costs(plan.costs, cap_bytes=plan.chosen.cap_bytes, largest=request.task.largest)
    return Launched(cutter=cutter, request=request, plan=plan)


def _proven(plan: TrainingPlan, costs: Costs, request: PlanRequest, trial: Trial, say: Say) -> Launched:
    """Try the plan's widest micro-batch, or that of a lower cap where memory runs out; then time shapes.

    By measured times, wider micro-batches may be faster; these are then tried, too.
    """
    assert plan.chosen is not None, "it has costs"
    proof = _Proof(request, trial, say, costs=costs, cap_bytes=plan.chosen.cap_bytes)
    if not plan.is_ample:
        proof.cap_bytes = _cap_now(proof.cap_bytes, costs, request, trial, say)
        proof.extend()
    timed, told_time = _timed(plan, proof.costs, proof.cap_bytes, request, trial)
    proof.costs = timed or proof.costs
    chosen = request.task.recut(plan.chosen, costs, proof.costs, cap_bytes=proof.cap_bytes)
    if not replace(plan, chosen=chosen).is_ample:
        proof.extend()
        chosen = request.task.recut(plan.chosen, costs, proof.costs, cap_bytes=proof.cap_bytes)
    plan = _taking(plan, replace(chosen, time_source="measured" if timed else chosen.time_source), proof.costs, request)
    if timed is not None:
        told_time += f", by which the run takes {training_words(plan)['seconds']}"
    return Launched(
        cutter=by_costs(proof.costs, cap_bytes=proof.cap_bytes, largest=request.task.largest),
        request=request,
        plan=plan,
        probes=tuple(proof.probes),
        measured=tuple(proof.measured),
        told=f"{proof.told}; {told_time}",
    )


def _cap_now(cap_bytes: int, costs: Costs, request: PlanRequest, trial: Trial, say: Say) -> int:
    """Return the cap less what the process has taken since it was planned: code, threads and their arenas.

    This concerns a CPU alone, where all of it is the same memory. The cap always holds the longest row, to be tried.
    """
    if not request.device.is_cpu:
        return cap_bytes
    trial.warm_up()
    importlib.import_module("torch._dynamo")  # an optimizer's first update would
    free_caches()
    left_bytes = request.budget().reserved_bytes + trial.held_bytes
    if left_bytes >= cap_bytes:
        return cap_bytes
    now_bytes = max(left_bytes, int(np.ceil(costs.peak_bytes(1, request.task.longest))))
    if request.task.epoch(costs, cap_bytes=cap_bytes).widest.peak_bytes > now_bytes:
        say(
            f"the process itself has taken {format_bytes(cap_bytes - left_bytes)} since the plan was made: "
            f"micro-batches get {format_bytes(now_bytes)}"
        )
    return now_bytes


def _taking(plan: TrainingPlan, chosen: Candidate, costs: Costs, request: PlanRequest) -> TrainingPlan:
    """Return the plan with what the device has shown of the strategy that it chose."""
    candidates = tuple(chosen if each == plan.chosen else each for each in plan.candidates)
    return request.with_phases(replace(plan, chosen=chosen, candidates=candidates, costs=costs))


class _Proof:
    """Hold what has been tried of a plan, and the costs and the cap that follow from it."""

    def __init__(self, request: PlanRequest, trial: Trial, say: Say, *, costs: Costs, cap_bytes: int) -> None:
        self._request, self._trial, self._say = request, trial, say
        self.costs, self.cap_bytes = costs, cap_bytes
        self.probes: list[Probe] = []
        self.measured: list[tuple[int, Probe]] = []
        self._widest: Shape | None = None  # that ran and fitted

    def extend(self) -> None:
        """Try the widest micro-batch, where none that takes as much has run; a lower cap where it does not fit."""
        while (widest := self._untried()) is not None:
            probe = self._trial.probe(widest.rows, widest.padded_length)
            self.probes.append(probe)
            if probe.outcome == "fits":
                self._widest = widest
                self._correct(probe, widest.peak_bytes)
                continue
            self.cap_bytes = _lowered(self.costs, self.cap_bytes, widest, self._request)
            self._say(
                f"{widest.rows:,} × {widest.padded_length:,} tokens ran out of memory when they were tried: "
                f"micro-batches get {format_bytes(self.cap_bytes)}"
            )

    def _correct(self, probe: Probe, predicted_bytes: int) -> None:
        """Fit the costs to a probe; a row that ran, and any smaller one, stays allowed."""
        longest = self._request.task.longest
        uncorrected_bytes = self.costs.uncorrected(predicted_bytes)
        if probe.peak_bytes is not None:
            self.costs = corrected(self.costs, (uncorrected_bytes, probe.peak_bytes))
        self.measured.append((uncorrected_bytes, probe))
        alone_bytes = float(self.costs.peak_bytes(1, longest))
        if alone_bytes > self.cap_bytes:
            self._say(
                f"by what was measured, the longest row ({longest:,} tokens) takes {format_bytes(round(alone_bytes))} "
                f"alone, more than the {format_bytes(self.cap_bytes)} that the plan leaves for it: rows go one by one"
            )
            self.costs = replace(self.costs, scale=self.costs.scale_to(self.cap_bytes, length=longest))

    @property
    def told(self) -> str:
        """Return what was tried, in words."""
        if self._widest is None:
            return "not tried before the first step, since it needs less than half of the memory"
        return f"{self._widest.rows:,} × {self._widest.padded_length:,} tokens ran and fitted ({_tried(self.probes)})"

    def _untried(self) -> Shape | None:
        widest = self._request.task.epoch(self.costs, cap_bytes=self.cap_bytes).widest
        if self._widest is None:
            return widest
        proven_bytes = float(self.costs.peak_bytes(self._widest.rows, self._widest.padded_length))
        return widest if widest.peak_bytes > np.ceil(proven_bytes) else None


def _timed(
    plan: TrainingPlan, costs: Costs, cap_bytes: int, request: PlanRequest, trial: Trial
) -> tuple[Costs | None, str]:
    """Return the costs with measured times, None where the estimate or an earlier measurement stays; and a note."""
    assert plan.chosen is not None, "it has costs"
    if plan.chosen.time_source == "measured":
        return None, "timed by an earlier run"
    task = request.task
    most_rows, run_s = task.effective_batch_size, plan.least_seconds
    timing = Timing.of(task.lengths, costs=costs, cap_bytes=cap_bytes, most_rows=most_rows, run_s=run_s)
    if not timing.shapes:
        return None, f"time {timing.reason}"
    with trial.leaving_no_trace():
        samples = timing.measured(trial.run_shape, trial.clock, predicted=costs.time)
    fit = TimeFit.through(samples, costs.time)
    seconds = fit.surface(shortest=int(task.lengths.min()), longest=task.longest, most_rows=most_rows)
    told = f"timed {len(samples)} shapes of micro-batches, the model is off by {fit.relative_error:.0%}"
    return replace(costs, time=seconds), told


def _lowered(costs: Costs, cap_bytes: int, failed: Shape, request: PlanRequest) -> int:
    """Lower the cap, as a run does that ran out of memory. Raises OutOfMemoryError where a row alone does not fit."""
    cutter = ByLength(costs=costs, cap_bytes=cap_bytes)
    rows, length = np.arange(failed.rows), failed.padded_length
    lowered = cutter.lower(MicroBatch(rows=rows, padded_length=length, peak_bytes=failed.peak_bytes))
    alone_bytes = int(np.ceil(costs.peak_bytes(1, request.task.longest)))
    if lowered is None or alone_bytes >= failed.peak_bytes:
        position = rows_of_shape(request.rows.lengths, rows=1, tokens=failed.padded_length)[0]
        raise OutOfMemoryError(
            what=f"row {int(request.rows.keys[position])} ({failed.padded_length:,} tokens) ran out of memory "
            "alone, when it was tried before the first step; it was predicted to take "
            f"{format_bytes(failed.peak_bytes)}",
            fix="`brim plan` shows what would help; is something else on the device?",
        )
    return max(cutter.cap_bytes, alone_bytes)  # the longest row will be tried, and then it is known


def _searched(how: Search, plan: TrainingPlan | None, request: PlanRequest, trial: Trial) -> Launched:
    """Search for how many of the longest rows fit together; without a memory model, so many of any rows go together.

    Where the memory is to size the effective batch, it gets so many rows.
    """
    task = request.task
    most = task.effective_batch_size
    if request.is_sized_by_memory:
        most = min(len(request.rows), request.trainer.max_batch_size or len(request.rows))
    budget = request.budget() if plan is None else plan.budget
    found = find_batch_size(
        lambda size: trial.probe_size(size, task.longest), how=how, most=most, limit_bytes=trial.limit_bytes(budget)
    )
    told = f"{how}: {found.size} of the longest rows, {task.longest:,} tokens, fit together; {_tried(found.probes)}"
    if request.is_sized_by_memory:
        request = request.bounded(found.size)
        task = request.task
    if plan is None or plan.costs is None:
        return Launched(cutter=ByRows(max_rows=found.size), request=request, plan=plan, probes=found.probes, told=told)
    assert plan.chosen is not None, "it has costs"
    chosen, costs = plan.chosen, plan.costs
    plan = replace(plan, effective_batch_size=request.length.largest_size, total_steps=request.length.total_steps)
    cap_bytes = int(np.ceil(costs.peak_bytes(found.size, task.longest)))
    plan = _taking(plan, task.recut(chosen, costs, costs, cap_bytes=cap_bytes), costs, request)
    cutter = by_costs(costs, cap_bytes=cap_bytes, largest=task.largest)
    return Launched(cutter=cutter, request=request, plan=plan, probes=found.probes, told=told)


def _tried(probes: Sequence[Probe]) -> str:
    number = len(probes)
    failed = sum(probe.outcome != "fits" for probe in probes)
    return format_count(number, "probe") + (f", {failed} of them out of memory" if failed else "")


class Trial:
    """Try micro-batches of real rows as within a step: with gradients, and a placeholder for the optimizer's state."""

    def __init__(self, request: PlanRequest, llm: LLM, pad_id: int, *, state_bytes: int) -> None:
        self._rows, self._lengths = request.rows, request.rows.lengths
        self._llm, self._state_bytes = llm, state_bytes
        self.held_bytes = llm.held_bytes  # of weights and buffers
        self._is_warm = False
        scaler = torch.amp.GradScaler(llm.device.type, enabled=False)
        self._pass = MicroBatchPass(llm=llm, pad_id=pad_id, scaler=scaler)

    def probe(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is in bytes allocated, as a plan counts them."""
        device = self._llm.device
        if device.type == "cuda":
            return self._prober(tokens, counts="allocated")(rows)
        self.warm_up()
        meter = peak_meter(device)
        meter.begin()
        before_bytes = meter.peak_bytes()
        return self._prober(tokens)(rows).above(before_bytes, held_bytes=self.held_bytes)

    def warm_up(self) -> None:
        """Run the shortest row, once: threads, libraries' buffers and what is imported at first use come with it."""
        if not self._is_warm:
            self._prober(int(self._lengths.min()))(1)
            self._is_warm = True

    def probe_size(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is as the device counts it: what PyTorch reserved, or this process's memory."""
        return self._prober(tokens)(rows)

    def run_shape(self, rows: int, tokens: int) -> None:
        """Run a shape that is known to fit. Its gradients stay, as within a step: see `leaving_no_trace`."""
        self._forward_backward(self._rows_of(rows, tokens))

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Restore what many shapes change, once, so that it takes no time between them."""
        with no_trace(self._llm.model):
            yield
        free_caches()

    def clock(self) -> float:
        """Return seconds, once the device has done its work."""
        if self._llm.device.type == "cuda":
            torch.cuda.synchronize(self._llm.device)
        return time.perf_counter()

    def limit_bytes(self, budget: Budget) -> int | None:
        """Return what a peak may reach, as `probe_size` measures it: the free memory, at most the budget."""
        there_bytes = self._prober(2).limit_bytes
        if there_bytes is None:
            return None
        if self._llm.device.type == "cuda":
            return min(there_bytes, budget.reserved_bytes)
        if isinstance(peak_meter(self._llm.device), AddressSpacePeak):
            return there_bytes  # addresses, of which a budget of resident bytes says nothing
        return min(there_bytes, budget.limit_bytes - budget.margin_bytes)

    def _prober(self, tokens: int, *, counts: Counts = "reserved") -> Prober:
        return Prober(
            lambda size: self._in_midst_of_step(self._rows_of(size, tokens)),
            model=self._llm.model,
            device=self._llm.device,
            num_steps=1,
            counts=counts,
        )

    def _rows_of(self, rows: int, tokens: int) -> NDArray[np.intp]:
        """Return real rows that stand for a shape."""
        choose = rows_of_shape if self._llm.packed is None else rows_of_pack
        return choose(self._lengths, rows=rows, tokens=tokens)

    def _in_midst_of_step(self, rows: NDArray[np.intp]) -> None:
        with ExitStack() as stack:
            stack.enter_context(gradients_at_hand(self._llm.model.parameters()))
            if self._state_bytes:
                stack.enter_context(standing_for(self._state_bytes, self._llm.device))
            self._forward_backward(rows)

    def _forward_backward(self, rows: NDArray[np.intp]) -> None:
        self._llm.model.train()
        self._pass(self._rows.take(rows), max(int(self._rows.num_supervised[rows].sum()), 1), step=0)
