"""Trace one strategy: its memory and its time for every shape that the rows can make.

`PlanCache` keeps plans, so that for the same work on the same device none is made twice. `time_advice` says what would
make a step faster.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

import brim
from brim.batching import Costs
from brim.config.schema import Config, FinetuneTrainer
from brim.memory import tracing
from brim.memory.devices import Budget
from brim.notes import Say
from brim.planning.candidates import WayCosts
from brim.planning.costs import Correction, Shape, TimeEstimate, Traces, TrainingSteps, seconds_of, versions
from brim.planning.plan import TrainingPlan, Way
from brim.planning.request import PlanRequest
from brim.storage import Cache, digest


def traced(
    request: PlanRequest, way: Way, budget: Budget, correction: Correction, *, is_kept: bool, say: Say
) -> WayCosts:
    """Return the costs of a strategy by a few traces. is_kept: on disk, where earlier plans have left theirs.

    Raises UntraceableError for an architecture that cannot be traced.
    """
    steps = partial(TrainingSteps, is_single=request.task.effective_batch_size == 1)
    with request.traces(steps, config=request.config_of(way), is_kept=is_kept) as traces:
        return _traced(request, way, traces, budget, correction.scale, say)


def _traced(request: PlanRequest, way: Way, traces: Traces, budget: Budget, scale: float, say: Say) -> WayCosts:
    task, folder = request.task, request.folder
    basics = traces.basics
    peak = traces.peak_surface(
        task.lengths,
        most_rows=task.fixed_rows or task.effective_batch_size,
        cap_bytes=round(budget.reserved_bytes / max(scale, 1.0)),
        context_length=folder.context_length,
    )
    time = traces.time(
        task.lengths,
        longest=task.longest,
        wide=task.effective_batch_size,
        most_rows=task.effective_batch_size,
        known=[(shape[0], shape[1]) for shape in traces.asked if shape],  # by this plan, and no others that are kept
    )
    update_s = seconds_of(traces.find(()).work["update"], traces.speed)
    traces.save()
    if traces.note is not None:
        say(traces.note)
    costs = Costs(peak=peak, static_bytes=basics["static"], time=time.surface, scale=scale)

    def overhead(of: Sequence[Shape]) -> int:
        with tracing(folder):
            return traces.overhead_of(of)

    def traced_at(rows: int, tokens: int) -> Costs:
        with tracing(folder):
            return traces.verified(costs, rows=rows, tokens=tokens)

    return WayCosts(
        way=replace(way, chunked_loss=basics["chunk_positions"] > 0),
        costs=costs,
        least_bytes=max(basics[name] for name in ("static", "first_update", "update", "load")),
        state_bytes=basics["state"],
        update_s=update_s,
        overhead_bytes=overhead,
        bound_by=lambda of: time.parts(of).bound_by,
        advice=lambda of: time_advice(time, of),
        traced_at=traced_at,
    )


_KIND = "plans"


_FORMAT = 1


_STEP = 1.03  # budgets within 3% of each other share a plan: memory that happens to be free is never twice the same


_ALIKE = 0.01  # as in planning/calibration.py: a correction by less changes nothing


# These keys affect a training step's memory and time through the rows' lengths alone, which count for themselves.
_IRRELEVANT = {
    "base_model",  # its config.json counts
    "input_features",
    "output_features",
    "prompt",
    "chat",
    "preprocessing",
    "generation",
    "backend",
    "memory",  # the budget that comes of it counts
    "dataset",
    "random_seed",  # the order of the lengths counts
    "trust_remote_code",
}


_IRRELEVANT_TO_STEPS = {
    "eval_batch_size",
    "learning_rate",
    "learning_rate_scheduler",
    "learning_rate_scaling",
    "on_nonfinite",
    "early_stop",
    "steps_per_checkpoint",
    "checkpoints_per_epoch",
    "validation_field",
    "validation_metric",
    "skip_all_evaluation",
    "evaluate_training_set",
    # Their sizes, and the samples of each, count.
    "initial_effective_batch_size",
    "batch_rampup",
    "batch_schedule",
    "batch_increase_function",
    # They change the optimizer's numbers.
    "batch_lr_scaling",
    "batch_beta2_scaling",
}


class PlanCache:
    """Keep the plan of one piece of work under a budget. `note`: what was wrong with the file, if anything was."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], budget: Budget) -> None:
        self._cache = Cache(folder, _KIND)
        self._budget = budget
        # The device, the margin's cause and what is outside PyTorch are part of the work; only free memory varies.
        bucket = math.floor(math.log(max(budget.reserved_bytes, 1), _STEP))
        self._name, self._name_of_ample = (
            digest({"facts": facts, "device": budget.device, "bucket": each}) for each in (bucket, "any")
        )

    @property
    def note(self) -> str | None:
        return self._cache.note

    def read(self, *, scale: float = 1.0) -> TrainingPlan | None:
        """Return the plan under the budget of today; None where there is none that fits.

        scale: what runs have measured since of what shapes add to the memory; a plan that expects less is not used.
        """
        plan = self._read(self._name)
        if plan is None or plan.budget.reserved_bytes > self._budget.reserved_bytes:
            plan = self._read(self._name_of_ample)
            plan = None if plan is None else _under(plan, self._budget)
        if plan is None or (plan.costs is not None and plan.costs.scale * (1 + _ALIKE) < scale):
            return None
        return replace(plan, budget=self._budget, from_cache=True)

    def write(self, plan: TrainingPlan) -> None:
        """Keep a plan for later runs; one that more memory would not change is kept for any budget that it fits."""
        for name in (self._name, self._name_of_ample) if _is_ample(plan) else (self._name,):
            self._cache.write(name, replace(plan, from_cache=False).as_dict())

    def _read(self, name: str) -> TrainingPlan | None:
        saved = self._cache.read(name)
        if saved is None:
            return None
        try:
            return TrainingPlan.from_dict(saved)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self._cache.refuse(name)
            return None


def _is_ample(plan: TrainingPlan) -> bool:
    """Return whether the first strategy was chosen, and partitioned as if there were no limit."""
    return plan.candidates == (plan.chosen,) and not plan.candidates[0].cap_binds


def _under(plan: TrainingPlan, budget: Budget) -> TrainingPlan | None:
    """Return an ample plan under another budget, with the same partition; None where it does not fit."""
    chosen = plan.chosen
    if chosen is None or chosen.total_bytes is None:
        return None
    if chosen.total_bytes - plan.budget.outside_bytes > budget.reserved_bytes:
        return None
    less_bytes = max(plan.budget.reserved_bytes - budget.reserved_bytes, 0)
    chosen = replace(chosen, cap_bytes=chosen.cap_bytes - less_bytes)
    return replace(plan, chosen=chosen, candidates=(chosen,))


def plan_facts(
    config: Config, base_config: Mapping[str, Any], lengths: ArrayLike, *, adapter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all that a plan depends on beside the device's memory.

    config: resolved. base_config: the base model's config.json. lengths: tokens of the rows, in the order in which an
    epoch takes them. adapter: the settings that trained weights come with.
    """
    settings = config.model_dump(mode="json", exclude=_IRRELEVANT)
    if isinstance(config.trainer, FinetuneTrainer):
        settings["trainer"] = {k: v for k, v in settings["trainer"].items() if k not in _IRRELEVANT_TO_STEPS}
    tokens = np.ascontiguousarray(lengths, dtype="<i8")
    return {
        "format": _FORMAT,
        "settings": settings,
        "base": base_config,
        "adapter": adapter,
        "lengths": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "versions": {**versions(), "release": brim.__version__},
    }


_WORTH_SAYING = 0.02


def time_advice(estimate: TimeEstimate, shapes: Sequence[Shape]) -> tuple[str, ...]:
    """Return what would make steps faster. shapes: the micro-batches of typical steps, (rows, tokens of each)."""
    parts = estimate.parts(shapes)
    bound_by, share = parts.bound_by, parts.shares[parts.bound_by]
    less = less_when_doubled(estimate, shapes)
    doubled = "micro-batches of twice the rows would "
    doubled += f"take {less:.0%} less time per token" if less >= _WORTH_SAYING else "not make it faster"
    what, more = {
        "arithmetic": ("arithmetic", ", and 4-bit weights save memory, not time"),
        "memory traffic": (
            "memory traffic",
            "; 4-bit weights alone save none, since each product writes them out in half precision first",
        ),
        "launches": (
            "the host, which starts kernels",
            "; a device that computes faster would not help",
        ),
    }[bound_by]
    advice = (f"a step is bound by {what} ({share:.0%} of its time): {doubled}{more}",)
    recomputed = estimate.recomputed(shapes)
    if recomputed < _WORTH_SAYING:
        return advice
    more = (
        f"activation checkpointing spends {recomputed:.0%} of the time on recomputing: with free memory, drop it first"
    )
    return (*advice, more)


def less_when_doubled(estimate: TimeEstimate, shapes: Sequence[Shape]) -> float:
    """Return the share of the time a token that goes away with micro-batches of twice the rows."""
    rows, lengths = np.array(shapes, dtype=np.float64).T
    surface = estimate.surface
    return max(0.0, 1.0 - float(surface(2 * rows, lengths).sum()) / (2 * float(surface(rows, lengths).sum())))
