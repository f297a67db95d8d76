"""A plan for generation brought to the device: the passes that take the most are tried once before the first batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from brim.api.generation_proofs import GenerationProofs
from brim.api.generation_request import GenerationRequest
from brim.api.session import Say
from brim.batching.caches import free_caches
from brim.batching.no_trace import no_trace
from brim.batching.peak_meter import peak_meter
from brim.batching.probe import Probe
from brim.batching.prober import probed
from brim.data import TokenRow, TokenRows
from brim.infer.cache_shape import CacheShape
from brim.infer.next_token import NextToken
from brim.infer.passes import Passes
from brim.infer.peak_passes import peak_passes
from brim.infer.room import FixedRoom, MemoryRoom
from brim.infer.static_engine import StaticEngine
from brim.models.llm import LLM
from brim.planning.at_hand import budget_of
from brim.planning.calibration import Correction, Peak, at_once, of_run
from brim.planning.cpu_room import returns_at_once
from brim.planning.generation_cut import recut
from brim.planning.generation_plan import GenerationPlan
from brim.planning.heap_settings import map_large_blocks
from brim.units import format_bytes

_TINY = CacheShape(rows=1, columns=3, prompts=1, prompt_tokens=2)
_NOT_TRIED = "not tried before the first rows, "


def proven(
    plan: GenerationPlan, request: GenerationRequest, llm: LLM, settings: Mapping[str, Any], *, say: Say
) -> GenerationPlan:
    """The plan after one try of its first rows; with fewer rows, where they run out of memory.

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
        say(f"{_in_words(shape)} ran out of memory when they were tried: {_in_words(_shape_of(plan))} are taken")
        if _shape_of(plan) == shape:  # a row alone
            return replace(plan, proof=f"{number} probes, all of them out of memory")


def _why_not(plan: GenerationPlan, request: GenerationRequest) -> str:
    if plan.costs is None:
        return "since nothing was foretold that could be tried"
    if plan.fixed_rows is not None:
        return "since their number was given"
    if plan.is_ample:
        return "since less than half of the memory is needed"
    if request.is_slots and plan.uncorrected_bytes <= GenerationProofs(request).proven_bytes:
        return "since as much has run before"
    return ""


def _warm_up(llm: LLM, settings: Mapping[str, Any]) -> None:
    """Two tokens of transformers' `generate`: threads, libraries' buffers and what is imported at first use."""
    row = TokenRow(key=0, input_ids=np.zeros(2, dtype=np.int32), supervised=np.zeros(2, dtype=np.bool_))
    few = {**settings, "max_new_tokens": 2} | {"min_new_tokens": 0}
    room = FixedRoom(1, prefill_tokens=1)
    engine = StaticEngine(
        llm.model, settings=few, room=room, seed=0, device=llm.device, precision=llm.precision, is_misled=False
    )
    with no_trace(llm.model):
        engine.run(TokenRows.from_rows([row]), on_finished=lambda finished: None)


def _with_what_is_left(plan: GenerationPlan, request: GenerationRequest, say: Say) -> GenerationPlan:
    """On a CPU, less what has come into the process since it was planned: code, threads and their arenas."""
    assert plan.costs is not None, "asked before"
    if not request.device.is_cpu:
        return plan
    left_bytes = budget_of(
        request.config.memory, request.device, is_at_hand=True, held_bytes=request.held_bytes, trains=False
    ).reserved_bytes
    if left_bytes >= plan.cap_bytes:
        return plan
    now = recut(plan, request.lengths, plan.costs, cap_bytes=left_bytes)
    if now.rows != plan.rows:
        taken = format_bytes(plan.cap_bytes - left_bytes)
        say(f"{taken} of what was planned with are taken by the process itself since: {now.rows:,} rows are taken")
    return now


def _with_what_was_seen(plan: GenerationPlan, probe: Probe, request: GenerationRequest, number: int) -> GenerationPlan:
    """A probe that took more than predicted raises the costs of this job, too."""
    assert plan.costs is not None, "asked before"
    shape = _shape_of(plan)
    told = f"{shape.rows:,} rows × {shape.columns:,} tokens ran and fitted ({number} probe{'s' * (number > 1)}"
    GenerationProofs(request).add(plan.uncorrected_bytes)
    if probe.peak_bytes is None:
        return replace(plan, proof=f"{told})")
    peak = Peak(predicted_bytes=plan.uncorrected_bytes, measured_bytes=probe.peak_bytes)
    found = of_run([peak], static_bytes=plan.costs.static_bytes)
    if found is not None:
        request.calibrations.add(found)
    told += f": {format_bytes(probe.peak_bytes)}, predicted {format_bytes(plan.shapes[0].peak_bytes)})"
    scale = at_once(Correction(scale=plan.costs.scale), peak, static_bytes=plan.costs.static_bytes).scale
    if scale != plan.costs.scale:
        plan = recut(plan, request.lengths, replace(plan.costs, scale=scale), cap_bytes=plan.cap_bytes)
    return replace(plan, proof=told)


def _lowered(plan: GenerationPlan, failed: CacheShape, request: GenerationRequest) -> GenerationPlan:
    """As an engine does it."""
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
    """Tries shapes with the model at hand. Peaks are in bytes allocated, as a plan counts them."""

    def __init__(self, request: GenerationRequest, llm: LLM, settings: Mapping[str, Any]) -> None:
        self._request, self._llm, self._settings = request, llm, settings
        self._meter = peak_meter(llm.device, counts="allocated")
        self._run(_TINY)  # threads, libraries' buffers and what is imported at first use come with it

    def probe(self, shape: CacheShape) -> Probe:
        """One shape."""
        self._meter.begin()
        before_bytes = self._meter.peak_bytes()
        found = probed(shape.rows, lambda: self._run(shape), self._meter)
        self._meter.begin()
        if not self._request.device.is_cpu:
            return found
        if found.peak_bytes is None or before_bytes is None:
            return replace(found, peak_bytes=None)
        return replace(found, peak_bytes=found.peak_bytes - before_bytes + self._request.held_bytes)

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
