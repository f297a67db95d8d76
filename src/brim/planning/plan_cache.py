"""Keep plans, so that for the same work on the same device none is made twice."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

import brim
from brim.config.schema import Config
from brim.memory.devices import Budget
from brim.planning.costs import versions
from brim.planning.plan import TrainingPlan
from brim.storage import Cache, cache_folder, digest

_KIND = "plans"


_FORMAT = 1


_STEP = 1.03  # budgets within 3% of each other share a plan: memory that happens to be free is never twice the same


_ALIKE = 0.01  # as in costs/time.py: a correction by less changes nothing


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

    def __init__(self, facts: Mapping[str, Any], budget: Budget, *, folder: Path | None = None) -> None:
        self._cache = Cache(folder or cache_folder(), _KIND)
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
        plan: TrainingPlan | None = self._cache.read(self._name, TrainingPlan.from_dict)
        if plan is None or plan.budget.reserved_bytes > self._budget.reserved_bytes:
            ample = self._cache.read(self._name_of_ample, TrainingPlan.from_dict)
            plan = None if ample is None else _under(ample, self._budget)
        if plan is None or (plan.costs is not None and plan.costs.scale * (1 + _ALIKE) < scale):
            return None
        return replace(plan, budget=self._budget, from_cache=True)

    def write(self, plan: TrainingPlan) -> None:
        """Keep a plan for later runs; one that more memory would not change is kept for any budget that it fits."""
        for name in (self._name, self._name_of_ample) if _is_ample(plan) else (self._name,):
            self._cache.write(name, replace(plan, from_cache=False).as_dict())


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
    irrelevant: dict[str, Any] = {**dict.fromkeys(_IRRELEVANT, True), "trainer": _IRRELEVANT_TO_STEPS}
    tokens = np.ascontiguousarray(lengths, dtype="<i8")
    return {
        "format": _FORMAT,
        "settings": config.model_dump(mode="json", exclude=irrelevant),
        "base": base_config,
        "adapter": adapter,
        "lengths": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "versions": {**versions(), "release": brim.__version__},
    }
