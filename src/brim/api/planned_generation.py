"""An engine as it is planned: lines before it begins, one try where memory is scarce, and the room that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from brim.api.engine_choosing import with_fastest_engine
from brim.api.generation_launch import proven
from brim.api.generation_planning import plan_job
from brim.api.generation_request import GenerationRequest, request_of
from brim.api.inference import constraint_of, engine_for, settings_of
from brim.api.session import Say, Session, say_nothing
from brim.data import TokenRows
from brim.errors import InputError, Problem
from brim.infer.engine import Engine
from brim.infer.rows_at_once import Smaller
from brim.models.llm import LLM
from brim.notes import status
from brim.planning.at_hand import enforce
from brim.planning.generation_plan import GenerationPlan
from brim.report.generation_lines import engine_in_words, generation_lines
from brim.units import format_bytes

_NOTCH = 0.9  # of the tokens that did not fit: those that are tried next, or fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """What responds, and the plan that it goes by."""

    engine: Engine
    plan: GenerationPlan


def planned_engine(
    llm: LLM,
    session: Session,
    prompts: TokenRows,
    *,
    say: Say,
    on_smaller: Callable[[Smaller], None] = lambda smaller: None,
) -> PlannedEngine:
    """prompts: at least one. on_smaller: told when memory ran out and fewer rows go on.

    Raises InputError where the longest prompt is predicted not to fit even alone.
    """
    say(status("planning"))
    request = request_of(session, prompts.lengths, llm=llm)
    plan = plan_generation(request, say=say)
    require_fits(plan)
    if session.config.memory.budget != "auto":
        enforce(plan.budget, request.device)
    for line in generation_lines(plan):
        say(line)
    settings = settings_of(llm, session)
    say(status("trying the plan on the device"))
    plan = proven(plan, request, llm, settings, say=say)
    if plan.proof:
        say(f"launch: {plan.proof}")
    chosen = _with_engine(plan, request, llm, session, settings, prompts, say)
    engine = engine_for(llm, session, room=chosen.room(), on_smaller=on_smaller, kind=chosen.engine)
    return PlannedEngine(engine=engine, plan=chosen)


def _with_engine(
    plan: GenerationPlan,
    request: GenerationRequest,
    llm: LLM,
    session: Session,
    settings: Mapping[str, Any],
    prompts: TokenRows,
    say: Say,
) -> GenerationPlan:
    """The plan with the engine that is the fastest here, where that can be known."""
    chosen = with_fastest_engine(
        plan,
        request,
        llm,
        settings,
        prompts,
        lambda kind: engine_for(llm, session, room=plan.room(), kind=kind),
        constraint=constraint_of(session, settings),
        say=say,
    )
    if chosen is not plan:
        say(f"engine: {engine_in_words(chosen)}")
    return chosen


def plan_generation(request: GenerationRequest, *, say: Say = say_nothing) -> GenerationPlan:
    """Needs no weights. Where the number of rows is given, the plan says what it would have taken."""
    if request.fixed_rows is None:
        return plan_job(request, say=say)
    free = plan_job(replace(request, fixed_rows=None), say=say)
    fixed = plan_job(request, say=say)
    return replace(fixed, would_take=free.rows, would_take_reason=free.rows_reason)


def plan_of_one(llm: LLM, session: Session, *, prompt_tokens: int) -> GenerationPlan | None:
    """The plan of one response to a prompt of this length; None where memory.budget is auto, and it is tried."""
    if session.config.memory.budget == "auto":
        return None
    request = request_of(session, [prompt_tokens], llm=llm)
    return plan_generation(replace(request, fixed_rows=None), say=say_nothing)


def tokens_of_one(llm: LLM, session: Session, *, most: int) -> int:
    """Return how many tokens, up to `most`, a prompt and its response may have together within memory.budget.

    Found from above in a few plans, to a tenth; fewer tokens than a response may have where no prompt fits.
    """
    new_tokens = session.config.generation.max_new_tokens
    assert new_tokens is not None, "resolved before"
    while most > new_tokens:
        plan = plan_of_one(llm, session, prompt_tokens=most - new_tokens)
        if plan is None or plan.fits or plan.costs is None:
            return most
        static_bytes = plan.costs.static_bytes
        share = (plan.cap_bytes - static_bytes) / (plan.shapes[0].peak_bytes - static_bytes)
        most = int(most * min(max(share, 0.0), _NOTCH))
    return most


def require_fits(plan: GenerationPlan) -> None:
    """Raise InputError where the longest prompt does not fit even alone.

    A number of rows that was given is tried all the same: the engine goes on with fewer.
    """
    if plan.fits or plan.fixed_rows is not None or plan.total_bytes is None:
        return
    there = format_bytes(plan.budget.limit_bytes - plan.budget.margin_bytes)
    raise InputError(
        Problem(
            what=f"the longest prompt, {plan.prompts.longest:,} tokens, and a response of up to "
            f"{plan.max_new_tokens:,} take {format_bytes(plan.total_bytes)} even alone, and {there} may be used "
            f"({plan.budget.limit_reason})",
            where="memory",
            fix="lower generation.max_new_tokens, shorten the prompts, load the base in 4 bits (quantization.bits: 4), "
            + (
                "or set trainer.batch_size: 1 to try it all the same"
                if plan.budget.limit_reason != "memory.budget"
                else "or raise memory.budget"
            ),
        )
    )
