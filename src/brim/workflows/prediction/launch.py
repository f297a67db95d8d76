"""Make the engine that writes a job's responses, and bring its plan to the device.

It is brim's own where that can do it, else transformers' `generate`. The passes that take the most are tried once
before the first batch, where memory is scarce; what has run of what was predicted for a model is remembered, so that it
need not be tried again before each job. vLLM, where it is asked for or at hand on a GPU, gets folders, since it loads
the weights itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from brim.batching.memory import Probe, free_caches, no_trace, peak_meter, probed
from brim.config import Choice
from brim.data.tokens import TokenRow, TokenRows, label_tokens
from brim.errors import ConfigError, InputError
from brim.infer.engines import (
    CacheShape,
    Engine,
    FixedRoom,
    LabelConstraint,
    MemoryRoom,
    NextToken,
    Passes,
    Room,
    SlotsEngine,
    StaticEngine,
    VllmEngine,
    usual_pass_tokens,
)
from brim.memory.devices import budget_of, device_at_hand, settle_heap
from brim.memory.generation import peak_passes
from brim.models import LLM, precision
from brim.models.folders import AdapterFolder, open_adapter
from brim.models.loss import base_model
from brim.notes import Note, Say, status
from brim.planning import GenerationPlan, GenerationRequest, cannot, generation_request, plan_job, recut, short_plan
from brim.planning.costs import corrected
from brim.session import Session, with_choices
from brim.storage import Cache, cache_folder, digest
from brim.units import format_bytes, format_count
from brim.workflows.prediction.scoring import OnSmaller
from brim.workflows.runs import settings_of


def planned_engine(
    llm: LLM, session: Session, prompts: TokenRows, *, beside_bytes: int = 0, num_members: int = 1, say: Say
) -> tuple[Engine, GenerationPlan]:
    """Return what responds to at least one prompt, and the plan that it goes by, which is noted.

    beside_bytes: held beside the model. num_members: processes that respond to these prompts, of which this is one.
    Raises InputError where the longest prompt is predicted not to fit even alone.
    """
    say(status("planning"))
    how: dict[str, Any] = {"beside_bytes": beside_bytes, "num_members": num_members}
    request = generation_request(session, prompts.lengths, llm=llm, **how)
    plan = plan_job(request, say=say)
    require_fits(plan)
    request.keep_to(plan.budget)
    for line in short_plan(plan):
        say(line)
    settings = settings_of(session, llm.model.generation_config)
    say(status("trying the plan on the device"))
    plan = proven(plan, request, llm, settings, say=say)
    if plan.proof:
        say(Note(f"launch: {plan.proof}", kind="detail"))
    room = plan.room()
    return engine_for(llm, session, room=room, on_smaller=lambda smaller: say(str(smaller)), kind=plan.engine), plan


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


def engine_by_hand(llm: LLM, session: Session, *, rows: int, on_smaller: OnSmaller = lambda smaller: None) -> Engine:
    """Return what responds to the session's prompts, so many at a time."""
    pass_tokens = usual_pass_tokens(is_packed=llm.packed is not None, is_cuda=llm.device.type == "cuda")
    return engine_for(llm, session, room=FixedRoom(rows, prefill_tokens=pass_tokens), on_smaller=on_smaller)


def engine_for(llm: LLM, session: Session, *, room: Room, on_smaller: OnSmaller, kind: str | None = None) -> Engine:
    """Return what responds to the session's prompts.

    on_smaller: called each time that fewer rows go on together. kind: where it was chosen already; default: as
    `generation.engine` says; vLLM, which loads the weights itself, is made elsewhere. Raises ConfigError for an engine
    that cannot do what the configuration asks.
    """
    settings = settings_of(session, llm.model.generation_config)
    how: dict[str, Any] = {
        "settings": settings,
        "room": room,
        "seed": session.config.random_seed,
        "device": llm.device,
        "precision": llm.precision,
        "constraint": constraint_of(session, settings),
        "on_smaller": on_smaller,
        "packed": llm.packed,
    }
    asked = kind or session.config.generation.engine
    base = base_model(llm.model)
    against = SlotsEngine.why_not(base.config, settings, type(base))
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    if asked == "static" or against:
        return StaticEngine(llm.model, **how)
    return SlotsEngine(llm.model, **how)


def constraint_of(session: Session, settings: Mapping[str, Any]) -> LabelConstraint | None:
    """Return the constraint to labels of a category that asks for it. settings: what `settings_of` gives."""
    feature = session.config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        return None
    if not feature.labels:
        raise ConfigError(
            what=f"the labels of `{feature.name}` are not known, to which decoder.constrain_to_vocabulary holds it",
            where="output_features.0.decoder.match",
            fix="name the labels in output_features.0.preprocessing.vocab, or take the folder of a run",
        )
    return LabelConstraint(label_tokens(feature.labels, session.encoder), end_ids=settings["eos_token_id"])


_TINY = CacheShape(rows=1, columns=3, prompts=1, prompt_tokens=2)


def proven(
    plan: GenerationPlan, request: GenerationRequest, llm: LLM, settings: Mapping[str, Any], *, say: Say
) -> GenerationPlan:
    """Return the plan after one try of its first rows; with fewer rows, where they run out of memory.

    settings: what `generation_settings` gives. Weights and random states are left as they were.
    """
    settle_heap(is_cpu=request.device.is_cpu, is_ample=plan.is_ample)
    free_caches()  # what traces leave holds memory until Python looks for circles
    reason = _why_not(plan, request)
    if not reason and not request.is_slots:
        _warm_up(llm, settings)
        plan = _with_what_is_left(plan, request, say)
        reason = "which are those with the longest prompts"
    if reason:
        return replace(plan, proof=f"not tried before the first rows, {reason}")
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
    left_bytes = request.budget().reserved_bytes
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
                packed=llm.packed,
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
    return cache.read(name, int) or 0


def _keep_proof(request: GenerationRequest, predicted_bytes: int) -> None:
    if predicted_bytes > proven_bytes(request):
        cache, name = _proofs(request)
        cache.write(name, predicted_bytes)


def with_engine(session: Session, *, is_loaded: bool, say: Say) -> Session:
    """Return the session with vLLM as its engine where that is open, on a GPU that has it; a note says what is chosen.

    is_loaded: brim's own model is on the device already, beside which vLLM would load another one.
    """
    if session.config.generation.engine != "auto" or session.device.type != "cuda" or find_spec("vllm") is None:
        return session
    with_it = Choice(key="generation.engine", value="vllm", reason="it is installed, and the device is a CUDA GPU")
    chosen = with_choices(session, [with_it])
    against = "vLLM is not used: the model is loaded already" if is_loaded else ""
    try:
        against or vllm_engine(chosen, rows=None)
    except InputError as error:
        against = error.problems[0].what
    say(Note(f"generation.engine: auto ({against})" if against else str(with_it), kind="detail"))
    return session if against else chosen


def vllm_engine(session: Session, *, rows: int | None) -> VllmEngine:
    """Return what responds to the session's prompts. rows: at once, where somebody says so.

    Raises InputError where vLLM is not installed, or cannot do what the configuration asks.
    """
    config = session.config
    adapter = None if config.trained_adapter is None else open_adapter(config.trained_adapter)
    _require_plain_weights(session, adapter)
    settings = settings_of(session, _stored_generation(session))
    return VllmEngine(
        folder=str(session.folder.path),
        precision=precision(config.precision),  # type: ignore[arg-type]  # resolved: no `auto`
        device=session.device,
        memory_share=_memory_share(session),
        settings=settings,
        seed=config.random_seed,
        constraint=constraint_of(session, settings),
        adapter=None if adapter is None else adapter.path,
        adapter_rank=0 if adapter is None else adapter.settings.r,
        trust_remote_code=config.trust_remote_code,
        rows=rows,
    )


def _memory_share(session: Session) -> float:
    """Return the share of the GPU that the run may take, without the margin, as vLLM's own start-up measures it."""
    device = device_at_hand(session.device)
    if device.is_cpu:
        return 1.0  # it will be refused
    budget = budget_of(session.config.memory, device, is_at_hand=True)
    return min((budget.limit_bytes - budget.margin_bytes) / device.memory_bytes, 1.0)


def _require_plain_weights(session: Session, adapter: AdapterFolder | None) -> None:
    config, settings = session.config, None if adapter is None else adapter.settings
    for is_so, reason in (
        (config.initialize == "random", "initialize is random, and it loads weights from files"),
        (config.quantization is not None, "the base is quantised as it is loaded, which vLLM does in another way"),
        (settings is not None and settings.use_dora, "the adapter is a DoRA, which it does not know"),
        (settings is not None and settings.bias_type != "none", "the adapter has biases, which it does not know"),
    ):
        if is_so:
            raise InputError(
                what=f"vLLM cannot be used: {reason}",
                where="generation.engine: vllm",
                fix="set generation.engine: auto, or `brim export RUN --merge` first and predict with that model",
            )


def _stored_generation(session: Session) -> Any:
    """Return what the model's files say of generation, as the loaded model would."""
    from transformers import AutoConfig, GenerationConfig

    path = session.folder.path
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(path, trust_remote_code=session.config.trust_remote_code)
    )
