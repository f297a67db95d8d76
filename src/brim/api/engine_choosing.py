"""The engine of a planned job, measured on a sample of its prompts where that costs little, and remembered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from brim.api.engine_trial import time_engines
from brim.api.generation_request import GenerationRequest
from brim.api.session import Say
from brim.data import TokenRows
from brim.infer.engine import Constraint, Engine
from brim.infer.paged_support import why_not_paged
from brim.models.llm import LLM
from brim.planning.cache import Cache, cache_folder, digest
from brim.planning.engine_choice import PAGED, SLOTS, STATIC, UNREFILLED, EngineChoice, fastest, sample_of, unmeasured
from brim.planning.generation_plan import GenerationPlan

_KIND = "engines"


def with_fastest_engine(
    plan: GenerationPlan,
    request: GenerationRequest,
    llm: LLM,
    settings: Mapping[str, Any],
    prompts: TokenRows,
    make: Callable[[str], Engine],
    *,
    constraint: Constraint | None = None,
    say: Say,
) -> GenerationPlan:
    """The plan with the engine that writes its responses, and why; as it is where the configuration names the engine,
    or none but transformers' `generate` can write them.

    settings: what `generation_settings` gives. make: a new engine of a kind, with a new room of the plan's.
    """
    if request.config.generation.engine != "auto" or not request.is_slots:
        return plan
    against = _against(plan, llm, settings, constraint)
    kinds = [kind for kind in (SLOTS, UNREFILLED, PAGED, STATIC) if not against.get(kind)]
    rows = _rows_of_median(plan)
    verdicts = _Verdicts(request, kinds, rows=rows)
    choice = verdicts.known()
    if choice is None:
        sample = sample_of(prompts.lengths, rows=rows, num_engines=len(kinds), run_s=plan.seconds)
        if not sample.positions:
            choice = unmeasured(sample.reason)
        else:
            say(f"measuring {len(kinds)} engines on {len(sample.positions):,} of the prompts")
            timed = time_engines(
                kinds,
                make,
                prompts.take(sample.positions),
                time.perf_counter,
                allowed_s=sample.allowed_s,
                must_agree=llm.precision.name == "fp32",
            )
            choice = fastest(timed.seconds, num_rows=len(sample.positions), dropped={**timed.dropped, **against})
            verdicts.keep(choice)
    return plan.with_engine(choice.kind, choice.reason)


def _against(
    plan: GenerationPlan, llm: LLM, settings: Mapping[str, Any], constraint: Constraint | None
) -> dict[str, str]:
    """Why engines are not tried. They copy keys and values as they go, which the plan's room has not counted."""
    if not plan.is_ample:
        tight = "not tried where more than half of the memory is planned"
        return {PAGED: tight, STATIC: tight}
    reason = why_not_paged(llm.model, settings, precision=llm.precision, constraint=constraint)
    return {PAGED: reason} if reason else {}


def _rows_of_median(plan: GenerationPlan) -> int:
    return min(plan.room().rows(plan.prompts.median + plan.max_new_tokens), plan.prompts.num_rows)


class _Verdicts:
    """What was measured of this model on this device, with these versions and about so many rows."""

    def __init__(self, request: GenerationRequest, kinds: list[str], *, rows: int) -> None:
        self._cache = Cache(cache_folder(), _KIND)
        self._kinds = kinds
        self._name = digest({**request.facts, "engines": kinds, "rows": rows.bit_length()})

    def known(self) -> EngineChoice | None:
        saved = self._cache.read(self._name)
        if not isinstance(saved, dict) or saved.get("kind") not in self._kinds:
            return None
        return EngineChoice(kind=saved["kind"], reason=f"measured by an earlier job: {saved['reason']}")

    def keep(self, choice: EngineChoice) -> None:
        self._cache.write(self._name, choice.as_dict())
