"""Plan one training run: trace and partition each open strategy, and choose one.

The memory that runs have measured is kept for the plans of later ones. Notes say what a plan cannot promise
because of dropout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from brim.batching import Costs
from brim.config import Choice
from brim.config.schema import Config, FinetuneTrainer
from brim.distributed import Share
from brim.errors import ConfigError
from brim.memory.allocator import AllocatorSettings
from brim.memory.devices import Budget, Device, cpu_device, device_speed, link_between, link_to_host
from brim.memory.fsdp import Sharding
from brim.models.folders import open_adapter
from brim.notes import Say, status
from brim.planning.candidates import (
    WORTH,
    WayCosts,
    choose,
    could_gain_by_sharding,
    some_layers,
    verified_strategy,
    ways,
)
from brim.planning.costs import Correction, Shape, TrainingSteps, seconds_of
from brim.planning.helping import helps, too_long_rows
from brim.planning.plan import Candidate, Host, TrainingPlan, Way, Wire, summarize_lengths
from brim.planning.plan_cache import PlanCache, plan_facts
from brim.planning.request import STRATEGY_KEY, PlanRequest
from brim.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Hold a plan, and the values in place of `auto`."""

    plan: TrainingPlan
    choices: tuple[Choice, ...]
    request: PlanRequest  # as it was planned: memory may bound the batches that it asks for


def planned(request: PlanRequest, *, every_way: bool, replan: bool, say: Say) -> Planned:
    """Return the plan of a run whose layout and sizes are settled: one that is kept, or a new one."""
    say(status("planning"))
    correction = Correction()
    if not replan:
        request, correction = request.corrected(say=say)
    budget = request.budget()
    plan = None if replan else _cached(request, budget, correction, every_way=every_way, say=say)
    if plan is None:
        plan = _made(request, budget, correction, every_way=every_way, is_kept=not replan, say=say)
        if every_way or plan.chosen is not None:
            keep(plan, request, budget, every_way=every_way, say=say)
    plan = request.with_learning_rates(plan)
    return Planned(plan=plan, choices=tuple(_choices(request, plan)), request=request)


def keep(plan: TrainingPlan, request: PlanRequest, budget: Budget, *, every_way: bool, say: Say) -> None:
    """Keep a plan for later runs."""
    cache = _cache_of(request, budget, request.calibrations.correction(), every_way=every_way)
    cache.write(plan)
    if cache.note is not None:
        say(cache.note)


def _cache_of(request: PlanRequest, budget: Budget, correction: Correction, *, every_way: bool) -> PlanCache:
    """Return the cache of plans that show every strategy, or of those by which runs go.

    A run goes by its plan again, to the bit, unless what was measured since says that it promises too much.
    """
    facts = {**work_facts(request), "every_way": every_way}
    if not request.device.is_cpu:
        facts |= {"allocator": str(AllocatorSettings.from_environment(os.environ))}
    return PlanCache({**facts, "scale": correction.scale} if every_way else facts, budget)


def work_facts(request: PlanRequest) -> dict[str, Any]:
    """Return all that the plan of a run depends on beside the device."""
    adapter = request.config.adapter
    trained = None if adapter is None else adapter.pretrained_adapter_weights
    settings = None if trained is None else open_adapter(trained).settings.model_dump(mode="json")
    facts = plan_facts(request.config, request.folder.config, request.task.lengths, adapter=settings)
    length = request.length
    facts |= {"sizes": length.sizes, "course": length.course(), "notes": list(request.phase_notes())}
    if request.ranks > 1:
        facts |= {"ranks": request.ranks, "sharded": list(request.sharded)}
    if request.offload != "none":
        facts |= {"offload": request.offload}
    return facts


def _cached(
    request: PlanRequest, budget: Budget, correction: Correction, *, every_way: bool, say: Say
) -> TrainingPlan | None:
    """Return for a run the plan of an earlier run, which may have measured; else one that was only shown."""
    for shown in (True,) if every_way else (False, True):
        cache = _cache_of(request, budget, correction, every_way=shown)
        plan = cache.read(scale=correction.scale)
        if cache.note is not None:
            say(cache.note)
        if plan is not None:
            return plan
    return None


def _made(
    request: PlanRequest,
    budget: Budget,
    correction: Correction,
    *,
    every_way: bool,
    is_kept: bool,
    say: Say,
) -> TrainingPlan:
    """Look at the strategies in the order of preference; one that more memory would not make faster ends the search.

    Those after it are looked at only to be shown, where `every_way` asks for it.
    """
    known: list[WayCosts] = []
    candidates: list[Candidate] = []
    trainer = request.trainer
    open_ways = ways(
        checkpointing=trainer.enable_gradient_checkpointing,
        chunked=trainer.chunked_loss,
        sharded=request.sharded,
        offload=request.offload,
    )
    ended, has_more = None, False  # after so many; None: none ends the search

    def trace(way: Way) -> WayCosts:
        say(status(f"planning: {way}"))
        return traced(request, way, budget, correction.scale, known, is_kept=is_kept, say=say)

    for way in open_ways:
        if way in (each.way for each in known):
            continue
        is_first_sharded = way.is_sharded and bool(candidates) and not candidates[-1].way.is_sharded
        if is_first_sharded and not could_gain_by_sharding(known, candidates, request.task):
            has_more = True
            break
        costs = trace(way)
        if costs.way in (each.way for each in known):
            continue  # the architecture allows no chunks, and whole logits have been looked at
        costs, looked_at = verified_strategy(costs, request.task, budget)
        known.append(costs)
        candidates.append(looked_at)
        if way.gradient_checkpointing is True and trainer.enable_gradient_checkpointing == "auto":
            between = _between(request, known, candidates, trace, budget)
            if between is not None:
                known.append(between[0])
                candidates.append(between[1])
        if looked_at.fits and not looked_at.cap_binds:
            ended = ended or len(candidates)
            if not every_way:
                has_more = way != open_ways[-1]
                break
    chosen, reason = choose(candidates[:ended], has_more=has_more or len(candidates) > (ended or len(candidates)))
    return _plan(request, budget, candidates, known, chosen, reason, correction)


def _between(
    request: PlanRequest,
    known: Sequence[WayCosts],
    candidates: Sequence[Candidate],
    trace: Callable[[Way], WayCosts],
    budget: Budget,
) -> tuple[WayCosts, Candidate] | None:
    """Return the last strategy with fewer layers recomputed than all; None where that promises no gain.

    It is traced as the others are; where that shows room for fewer layers than were foreseen, these are, too.
    """
    on, all_layers, num_layers = known[-1], candidates[-1], request.architecture.get_text_config().num_hidden_layers
    off = next((each for each in known if each.way == replace(on.way, gradient_checkpointing=False)), None)
    if off is None or not all_layers.fits:
        return None
    cap_bytes = all_layers.cap_bytes
    best = some_layers(off, on, request.task, budget, num_layers=num_layers, cap_bytes=cap_bytes)
    least_s = min(each.seconds_per_epoch for each in candidates if each.seconds_per_epoch is not None)
    if best is None or best.seconds_per_epoch is None or best.seconds_per_epoch >= least_s * (1 - WORTH):
        return None

    def looked_at(number: int) -> tuple[WayCosts, Candidate]:
        costs = trace(replace(on.way, gradient_checkpointing=number))
        costs, found = verified_strategy(costs, request.task, budget)
        return costs, replace(found, reason=f"recomputes {number} of {num_layers} layers; {found.reason}")

    number = best.way.gradient_checkpointing
    try:
        costs, found = looked_at(number)
        if found.widest is None:
            return costs, found
        peak_bytes, without_bytes = (float(each.costs.peak_bytes(*found.widest)) for each in (costs, off))
        too_many = int((found.cap_bytes - peak_bytes) * number / max(without_bytes - peak_bytes, 1))
        if 1 <= too_many <= number - 2:
            fewer = looked_at(number - too_many)
            if (fewer[1].seconds_per_epoch or math.inf) < (found.seconds_per_epoch or math.inf):
                return fewer
    except ConfigError:  # layers that cannot be told from each other
        return None
    return costs, found


# Of the example's model, whole effective batches took 0.92 of the padded ones' time in packed micro-batches of up to
# 1,024 tokens, 0.89 with 2,048, 0.88 with 3,072 and 0.89 with all 6,000 in one (medians of 6, one thread).
_MOST_PACKED_ON_A_CPU = 2048


def _wire(request: PlanRequest, summed_bytes: int, *, is_sharded: bool) -> Wire | None:
    """Return what ranks send each other; None where there is one process. summed_bytes: see TrainingSteps.

    A ring carries (N - 1) / N of what is gathered or reduced past each rank, and a sum is both.
    """
    if request.ranks == 1:
        return None
    link, share = link_between(request.device), (request.ranks - 1) / request.ranks
    vector = Share.sent_bytes(request.ranks, num_parameters=0)
    return Wire(
        num_ranks=request.ranks,
        link=link.name,
        source=link.source,
        bytes_per_s=link.bytes_per_s,
        update_bytes=round(2 * share * (vector + (0 if is_sharded else summed_bytes))),
        round_bytes=round(share * summed_bytes) if is_sharded else 0,
    )


def laid_out(request: PlanRequest, costs: Costs) -> Costs:
    """Return the costs of rows in the layout that is asked for."""
    most_tokens = _MOST_PACKED_ON_A_CPU if request.device.is_cpu and not request.task.largest else None
    return replace(costs, multiple=request.multiple, most_tokens=most_tokens)


def traced(
    request: PlanRequest, way: Way, budget: Budget, scale: float, known: Sequence[WayCosts], *, is_kept: bool, say: Say
) -> WayCosts:
    """Return the costs of a strategy by a few traces. is_kept: on disk, where earlier plans have left theirs.

    known: of others; the same one without sharding was traced alike. Raises UntraceableError where nothing can be.
    """
    task, ranks = request.task, request.ranks
    steps = partial(TrainingSteps, is_single=task.effective_batch_size == 1, ranks=ranks)
    sharding = None
    if way.is_sharded:
        sharding = Sharding(world_size=ranks, offload=way.offload).on(request.device)
    elif way.offload != "none":
        sharding = Sharding(world_size=1, kind="whole", offload=way.offload).on(request.device)
    like = next((each.traces for each in known if replace(each.way, is_sharded=way.is_sharded) == way), None)
    with request.traces(steps, config=request.config_of(way), is_kept=is_kept, sharding=sharding, like=like) as traces:
        basics = traces.basics
        peak = traces.peak_surface(
            task.lengths,
            most_rows=task.fixed_rows or task.effective_batch_size,
            cap_bytes=round(budget.reserved_bytes / max(scale, 1.0)),
            context_length=request.folder.context_length,
        )
        time = traces.time(
            task.lengths,
            longest=task.longest,
            wide=task.effective_batch_size,
            most_rows=task.effective_batch_size,
            # By this plan, and no others that are kept.
            known=[(shape[0], shape[1]) for shape in traces.asked if shape],
        )
        host = _host(request.device, basics)
        # Of a machine whose CPU is not known, as of one that is, only the number of cores here counts.
        speed = traces.speed if host is None else device_speed(cpu_device(), num_cores=torch.get_num_threads())
        update_s = seconds_of(traces.find(()).work["update"], speed) + (0.0 if host is None else host.update_s)
        traces.save()
    if traces.note is not None:
        say(traces.note)
    surface = time.surface if host is None else time.surface.plus(host.copied_s)
    costs = laid_out(request, Costs(peak=peak, static_bytes=basics["static"], time=surface, scale=scale))

    def overhead(of: Sequence[Shape]) -> int:
        with request.tracing():
            return traces.overhead_of(of)

    def traced_at(rows: int, tokens: int) -> Costs:
        with request.tracing():
            return traces.verified(costs, rows=rows, tokens=tokens)

    return WayCosts(
        way=replace(way, chunked_loss=basics["chunk_positions"] > 0),
        costs=costs,
        least_bytes=max(basics[name] for name in ("static", "first_update", "update", "load")),
        state_bytes=basics["state"],
        saved_bytes=basics["saved"],
        update_s=update_s,
        overhead_bytes=overhead,
        bound_by=lambda of: time.parts(of).bound_by,
        advice=time.advice,
        traced_at=traced_at,
        wire=_wire(request, basics["summed"], is_sharded=way.is_sharded),
        traces=traces,
        host=host,
    )


def _host(device: Device, basics: Mapping[str, int]) -> Host | None:
    """Return what lies on the host, and what is copied; None where that is nothing. basics: of TrainingSteps."""
    if not basics["host"]:
        return None
    link = link_to_host(device)
    figures: Any = {"link": link.name, "source": link.source, "bytes_per_s": link.bytes_per_s}
    return Host(num_bytes=basics["host"], copied_bytes=basics["copied"], update_bytes=basics["copied_once"], **figures)


def _plan(
    request: PlanRequest,
    budget: Budget,
    candidates: Sequence[Candidate],
    known: Sequence[WayCosts],
    chosen: Candidate | None,
    reason: str,
    correction: Correction,
) -> TrainingPlan:
    length = request.length
    taken = None if chosen is None else known[candidates.index(chosen)]
    plan = TrainingPlan(
        budget=budget,
        lengths=summarize_lengths(request.rows.lengths),
        effective_batch_size=length.largest_size,
        total_steps=length.total_steps,
        candidates=tuple(candidates),
        chosen=chosen,
        reason=reason,
        costs=None if taken is None else taken.costs,
        strategy_reason=_why_held(request, candidates, chosen),
        seconds=None,
        advice=_advice(request, chosen, correction),
        from_cache=False,
        state_bytes=0 if taken is None else taken.state_bytes,
        saved_bytes=0 if taken is None else taken.saved_bytes,
        helps=() if chosen is not None else helps(request, budget, candidates, known),
        too_long=() if chosen is not None else too_long_rows(request, candidates, known),
    )
    return request.with_phases(plan)


def _why_held(request: PlanRequest, candidates: Sequence[Candidate], chosen: Candidate | None) -> str:
    """Say why each of several ranks has the whole model, or a part of it; empty for one process."""
    if request.ranks == 1 or chosen is None:
        return ""
    if len(request.sharded) == 1:
        return "memory.offload" if request.offload == "weights" else STRATEGY_KEY
    if not chosen.way.is_sharded:
        sharded_s = [each.seconds_per_epoch for each in candidates if each.fits and each.way.is_sharded]
        if any(each is not None and each <= (chosen.seconds_per_epoch or 0.0) for each in sharded_s):
            return "the whole model fits, and sharding would hardly be faster"
        return f"the whole model fits, and sharding would {'be slower' if sharded_s else 'not be faster'}"
    replicated = [each for each in candidates if not each.way.is_sharded]
    if any(each.fits for each in replicated):
        return "that is faster than the whole model in each"
    least = min(replicated, key=lambda each: each.single_row_bytes)
    return f"the whole model does not fit in a process: {least.way}: {least.reason}"


def _advice(request: PlanRequest, chosen: Candidate | None, correction: Correction) -> tuple[str, ...]:
    notes = tuple(dropout_notes(request.config, request.architecture.to_dict()))
    if correction.scale != 1:
        notes = (f"what micro-batches add to the memory is corrected by what was {correction.reason}", *notes)
    notes = (*request.phase_notes(fits=chosen is not None), *notes)
    return notes if chosen is None else (*notes, *chosen.advice)


def _choices(request: PlanRequest, plan: TrainingPlan) -> Iterator[Choice]:
    """Yield what the configuration leaves open. The loss is in chunks wherever the plan is not against them."""
    chosen, trainer = plan.chosen, request.trainer
    if request.is_sized_by_memory:
        yield request.largest_choice()
    if trainer.enable_gradient_checkpointing == "auto":
        value: bool | int = True
        why = "no strategy fits, and this takes the least"
        if chosen is not None:
            value, why = chosen.way.gradient_checkpointing, plan.reason
            if chosen.way.recomputes_some:
                fills = f"fills {format_bytes(chosen.total_bytes or 0)} of {format_bytes(plan.budget.limit_bytes)}"
                why = f"{chosen.reason.partition(';')[0]}, {fills}; {why}"
        yield Choice(key="trainer.enable_gradient_checkpointing", value=value, reason=why)
    if request.ranks > 1 and chosen is not None and request.config.backend.trainer.strategy == "auto":
        yield Choice(key=STRATEGY_KEY, value="fsdp" if chosen.way.is_sharded else "ddp", reason=plan.strategy_reason)
    has_chunks = any(each.way.chunked_loss for each in plan.candidates)
    if trainer.chunked_loss == "auto" and has_chunks and chosen is not None and not chosen.way.chunked_loss:
        yield Choice(key="trainer.chunked_loss", value=False, reason=plan.reason)


_ALIKE = "partitioned differently, under another memory, the losses are close and not equal"


def dropout_notes(config: Config, base: Mapping[str, Any]) -> Iterator[str]:
    """Yield what dropout keeps a plan from promising.

    config: resolved, with a training. base: the base model's settings, defaults among them (see own_dropout).
    """
    trainer, adapter = config.trainer, config.adapter
    assert isinstance(trainer, FinetuneTrainer), "only training drops anything"
    rate = 0.0 if adapter is None else adapter.dropout
    if rate and not trainer.dropout_by_row:
        yield (
            f"adapter.dropout {rate:g} is drawn for each micro-batch: {_ALIKE}. "
            "trainer.dropout_by_row: true makes them equal"
        )
    if trainer.dropout_by_row and not rate:
        why = "there is no adapter" if adapter is None else "adapter.dropout is 0"
        yield f"trainer.dropout_by_row changes nothing: {why}"
    own = ", ".join(f"{name} {value:g}" for name, value in own_dropout(base).items())
    if own:
        by_row = ", which trainer.dropout_by_row leaves as it is" if trainer.dropout_by_row else ""
        yield f"the base model has dropout of its own ({own}){by_row}: {_ALIKE}"


# As transformers' configurations name them: attention_dropout, resid_pdrop, hidden_dropout_prob, dropout_rate, …
_ENDINGS = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate")


# Of heads that a language model does not have.
_OF_OTHER_HEADS = {"classifier_dropout", "classifier_dropout_prob", "summary_first_dropout", "final_dropout"}


def own_dropout(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return name and rate of each dropout that is active in training.

    settings: config.json with the architecture's defaults (`PretrainedConfig.to_dict`).
    """
    text = settings.get("text_config")
    merged = {**settings, **(text if isinstance(text, Mapping) else {})}
    return {
        name: float(value)
        for name, value in merged.items()
        if name.endswith(_ENDINGS) and name not in _OF_OTHER_HEADS and isinstance(value, int | float) and value > 0
    }
