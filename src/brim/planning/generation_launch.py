"""Bring a plan for generation to the device: note what is planned, try it once, and make the engine.

The passes that take the most are tried once before the first batch, where memory is scarce. What has run of what was
predicted for a model is remembered, so that it need not be tried again before each job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from brim.batching.memory import Probe, free_caches, no_trace, peak_meter, probed
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError
from brim.infer.engines import (
    CacheShape,
    Engine,
    FixedRoom,
    MemoryRoom,
    NextToken,
    Passes,
    StaticEngine,
)
from brim.memory import Asked
from brim.memory.devices import enforce, map_large_blocks, returns_at_once
from brim.memory.generation import peak_passes
from brim.models import LLM
from brim.notes import Note, Say, status
from brim.planning.costs import corrected
from brim.planning.engines import engine_for, settings_of
from brim.planning.generation import plan_job, recut
from brim.planning.plan import GenerationPlan
from brim.planning.request import GenerationRequest, generation_request
from brim.planning.words import short_plan
from brim.session import Session, say_nothing
from brim.storage import Cache, cache_folder, digest
from brim.units import format_bytes, format_count

_NOTCH = 0.9  # of the tokens that did not fit: those that are tried next, or fewer


def planned_engine(llm: LLM, session: Session, prompts: TokenRows, *, say: Say) -> tuple[Engine, GenerationPlan]:
    """Return what responds to at least one prompt, and the plan that it goes by, which is noted.

    Raises InputError where the longest prompt is predicted not to fit even alone.
    """
    say(status("planning"))
    request = generation_request(session, prompts.lengths, llm=llm)
    plan = _plan(request, say=say)
    require_fits(plan)
    if session.config.memory.budget != "auto":
        enforce(plan.budget, request.device)
    for line in short_plan(plan):
        say(line)
    settings = settings_of(llm, session)
    say(status("trying the plan on the device"))
    plan = proven(plan, request, llm, settings, say=say)
    if plan.proof:
        say(Note(f"launch: {plan.proof}", kind="detail"))
    room = plan.room()
    return engine_for(llm, session, room=room, on_smaller=lambda smaller: say(str(smaller)), kind=plan.engine), plan


def plan_generation(
    session: Session, lengths: ArrayLike, *, asked: Asked | None, is_at_hand: bool, say: Say
) -> GenerationPlan:
    """Return the plan of a job without its weights. lengths: tokens of the prompts. See `generation_request`."""
    return _plan(generation_request(session, lengths, asked=asked, is_at_hand=is_at_hand), say=say)


def _plan(request: GenerationRequest, *, say: Say) -> GenerationPlan:
    """Return the plan; where the number of rows is given, it says what it would have taken."""
    if request.fixed_rows is None:
        return plan_job(request, say=say)
    free = plan_job(replace(request, fixed_rows=None), say=say)
    fixed = plan_job(request, say=say)
    return replace(fixed, would_take=free.rows, would_take_reason=free.rows_reason)


def plan_of_one(llm: LLM, session: Session, *, prompt_tokens: int) -> GenerationPlan | None:
    """Return the plan of one response to a prompt of this length; None where memory.budget is auto, and it is tried."""
    if session.config.memory.budget == "auto":
        return None
    request = generation_request(session, [prompt_tokens], llm=llm)
    return plan_job(replace(request, fixed_rows=None), say=say_nothing)


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


def require_one_fits(llm: LLM, session: Session, *, prompt_tokens: int) -> None:
    """Raise InputError for a prompt of this length that is predicted not to fit memory.budget with its response."""
    plan = plan_of_one(llm, session, prompt_tokens=prompt_tokens)
    if plan is not None:
        require_fits(plan)


def require_fits(plan: GenerationPlan) -> None:
    """Raise InputError where the longest prompt does not fit even alone.

    A number of rows that was given is tried all the same: the engine goes on with fewer.
    """
    if plan.fits or plan.fixed_rows is not None or plan.total_bytes is None:
        return
    budget = plan.budget
    there = format_bytes(budget.limit_bytes - budget.margin_bytes)
    is_by_hand = budget.limit_reason == "memory.budget"
    otherwise = "raise memory.budget" if is_by_hand else "set trainer.batch_size: 1 to try it all the same"
    raise InputError(
        what=f"the longest prompt, {format_count(plan.prompts.longest, 'token')}, and a response of up to "
        f"{plan.max_new_tokens:,} take {format_bytes(plan.total_bytes)} even alone, and {there} may be used "
        f"({budget.limit_reason})",
        where="memory",
        fix="lower generation.max_new_tokens, shorten the prompts, load the base in 4 bits (quantization.bits: 4), "
        f"or {otherwise}",
    )


_TINY = CacheShape(rows=1, columns=3, prompts=1, prompt_tokens=2)


_NOT_TRIED = "not tried before the first rows, "


def proven(
    plan: GenerationPlan, request: GenerationRequest, llm: LLM, settings: Mapping[str, Any], *, say: Say
) -> GenerationPlan:
    """Return the plan after one try of its first rows; with fewer rows, where they run out of memory.

    settings: what `generation_settings` gives. Weights and random states are left as they were.
    """
    if request.device.is_cpu and not plan.is_ample and not returns_at_once(os.environ):
        map_large_blocks()
    free_caches()  # what traces leave holds memory until Python looks for circles
    reason = _why_not(plan, request)
    if not reason and not request.is_slots:
        _warm_up(llm, settings)
        plan = _with_what_is_left(plan, request, say)
        reason = "which are those with the longest prompts"
    if reason:
        return replace(plan, proof=_NOT_TRIED + reason)
    trial = _Trial(request, llm, settings)
    plan = _with_what_is_left(plan, request, say)
    number = 0
    while True:
        shape, number = _shape_of(plan), number + 1
        probe = trial.probe(shape)
        if probe.outcome == "fits":
            return _with_what_was_seen(plan, probe, request, number)
        plan = _lowered(plan, shape, request)
        say(f"{_in_words(shape)} ran out of memory when they were tried: {_in_words(_shape_of(plan))} follow")
        if _shape_of(plan) == shape:  # a row alone
            return replace(plan, proof=f"{format_count(number, 'probe')}, all of them out of memory")


def _why_not(plan: GenerationPlan, request: GenerationRequest) -> str:
    if plan.costs is None:
        return "since there is no prediction to try"
    if plan.fixed_rows is not None:
        return "since their number is configured"
    if plan.is_ample:
        return "since less than half of the memory is needed"
    if request.is_slots and plan.uncorrected_bytes <= proven_bytes(request):
        return "since as much has run before"
    return ""


def _warm_up(llm: LLM, settings: Mapping[str, Any]) -> None:
    """Run two tokens of transformers' `generate`, which brings threads, libraries' buffers and imports."""
    row = TokenRow(key=0, input_ids=np.zeros(2, dtype=np.int32), supervised=np.zeros(2, dtype=np.bool_))
    few = {**settings, "max_new_tokens": 2} | {"min_new_tokens": 0}
    room = FixedRoom(1, prefill_tokens=1)
    engine = StaticEngine(
        llm.model, settings=few, room=room, seed=0, device=llm.device, precision=llm.precision, is_misled=False
    )
    with no_trace(llm.model):
        engine.run(TokenRows.from_rows([row]), on_finished=lambda finished: None)


def _with_what_is_left(plan: GenerationPlan, request: GenerationRequest, say: Say) -> GenerationPlan:
    """Return the plan, on a CPU less what has come into the process since: code, threads and their arenas."""
    assert plan.costs is not None, "asked before"
    if not request.device.is_cpu:
        return plan
    left_bytes = request.budget(is_at_hand=True).reserved_bytes
    if left_bytes >= plan.cap_bytes:
        return plan
    now = recut(plan, request.lengths, plan.costs, cap_bytes=left_bytes)
    if now.rows != plan.rows:
        taken = format_bytes(plan.cap_bytes - left_bytes)
        rows = format_count(now.rows, "row")
        say(f"the process itself has taken {taken} of the planned memory since: {rows} run together")
    return now


def _with_what_was_seen(plan: GenerationPlan, probe: Probe, request: GenerationRequest, number: int) -> GenerationPlan:
    """Return the plan with what a probe has shown: one that took more than predicted raises the costs."""
    assert plan.costs is not None, "asked before"
    shape = _shape_of(plan)
    proof = f"{shape.rows:,} rows × {shape.columns:,} tokens ran and fitted ({format_count(number, 'probe')}"
    _keep_proof(request, plan.uncorrected_bytes)
    if probe.peak_bytes is None:
        return replace(plan, proof=f"{proof})")
    peak = (plan.uncorrected_bytes, probe.peak_bytes)
    request.calibrations.learn([peak], static_bytes=plan.costs.static_bytes)
    proof += f": {format_bytes(probe.peak_bytes)}, predicted {format_bytes(plan.shapes[0].peak_bytes)})"
    costs = corrected(plan.costs, peak)
    if costs != plan.costs:
        plan = recut(plan, request.lengths, costs, cap_bytes=plan.cap_bytes)
    return replace(plan, proof=proof)


def _lowered(plan: GenerationPlan, failed: CacheShape, request: GenerationRequest) -> GenerationPlan:
    """Return the plan with fewer rows, as an engine would go on."""
    assert plan.costs is not None, "asked before"
    room = MemoryRoom(plan.costs, cap_bytes=plan.cap_bytes, most_rows=plan.most_rows)
    room.shrink(rows=failed.rows, columns=failed.columns)
    costs = replace(plan.costs, prefill_tokens=room.prefill_tokens)
    return replace(recut(plan, request.lengths, costs, cap_bytes=room.cap_bytes), prefill_tokens=room.prefill_tokens)


def _shape_of(plan: GenerationPlan) -> CacheShape:
    assert plan.costs is not None, "asked before"
    return plan.shapes[0].cache_shape(plan.costs)


def _in_words(shape: CacheShape) -> str:
    prompts = "prompt" if shape.prompts == 1 else "prompts"
    return f"{shape.rows:,} rows × {shape.columns:,} tokens, {shape.prompts:,} {prompts} in a pass,"


class _Trial:
    """Try shapes with the loaded model. Peaks are in bytes allocated, as a plan counts them."""

    def __init__(self, request: GenerationRequest, llm: LLM, settings: Mapping[str, Any]) -> None:
        self._request, self._llm, self._settings = request, llm, settings
        self._meter = peak_meter(llm.device, counts="allocated")
        self._run(_TINY)  # threads, libraries' buffers and what is imported at first use come with it

    def probe(self, shape: CacheShape) -> Probe:
        """Try one shape."""
        self._meter.begin()
        before_bytes = self._meter.peak_bytes()
        found = probed(shape.rows, lambda: self._run(shape), self._meter)
        self._meter.begin()
        if not self._request.device.is_cpu:
            return found
        return found.above(before_bytes, held_bytes=self._request.held_bytes)

    def _run(self, shape: CacheShape) -> int:
        llm = self._llm
        chooser = NextToken(self._settings, seed=0, device=llm.device)
        with no_trace(llm.model), torch.inference_mode():
            llm.model.eval()
            passes = Passes(
                llm.model,
                rows=shape.rows,
                columns=shape.columns,
                pad_id=self._settings["pad_token_id"],
                device=llm.device,
                precision=llm.precision,
            )
            peak_passes(passes, chooser, shape)
        return 1


_PROOFS_KIND = "generation-proofs"


def _proofs(request: GenerationRequest) -> tuple[Cache, str]:
    """Return the cache of what was tried, and the name there of the request's model, settings, device and versions."""
    return Cache(cache_folder(), _PROOFS_KIND), digest(request.facts)


def proven_bytes(request: GenerationRequest) -> int:
    """Return the largest uncorrected prediction, of bytes allocated, that was tried and fitted; 0: none was."""
    cache, name = _proofs(request)
    saved = cache.read(name)
    return saved if isinstance(saved, int) else 0


def _keep_proof(request: GenerationRequest, predicted_bytes: int) -> None:
    if predicted_bytes > proven_bytes(request):
        cache, name = _proofs(request)
        cache.write(name, predicted_bytes)
