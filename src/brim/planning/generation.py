"""Plan one job of generation from a configuration, a device and the lengths of prompts.

The plan is made by the closed form, or traced where that pays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError
from brim.infer.engines import (
    USUAL_PASS_TOKENS,
    CacheCosts,
    CacheShape,
    generation_settings,
    model_class,
    why_alone,
    why_not_slots,
)
from brim.memory import (
    ONE_AT_A_TIME,
    UNTRACEABLE,
    Budget,
    ConfigWorkload,
    Device,
    DeviceSpeed,
    budget_of,
    device_at_hand,
    device_speed,
    is_a_mistake_of_brims,
    read_architecture,
    untraceable,
)
from brim.memory.allocator import AllocatorSettings
from brim.memory.cuda import CudaTarget
from brim.models import LLM, ModelFolder
from brim.notes import Say
from brim.planning.costs import (
    Calibrations,
    Correction,
    PassTimes,
    PrefillTokens,
    TracedCaches,
    cache_model,
    cache_region,
    closed_cache_costs,
    closed_seconds,
    prefill_tokens,
    verified_cache_costs,
    versions,
    weight_bytes,
)
from brim.planning.engines import cannot
from brim.planning.generation_plan import GenerationTask, cut
from brim.planning.plan import GenerationPlan, PlannedRows, summarize_lengths
from brim.session import Session
from brim.storage import cache_folder, source_digest
from brim.units import format_seconds

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Four to six traces take a few seconds: of a job ten times as long they are a tenth at most.
_WORTH_TRACING_S = 30.0


_UNTRACED_ROWS = 8  # where nothing is known: a step of eight rows reads the weights once, not eight times


_UNTRACED_PASS = PrefillTokens(tokens=USUAL_PASS_TOKENS, reason="usual where nothing was traced")


_SETTLED = 2  # rounds: the allocator's overhead depends on the shapes, which depend on the cap, which depends on it


_COLUMNS_ON_THE_WAY = (0.7, 0.85)  # of a cache: the allocator sees windows grow


_DTYPES = {"fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def plan_job(request: GenerationRequest, *, say: Say) -> GenerationPlan:
    """What an earlier job has traced or measured of the same model on the same device is used again."""
    calibrations = request.calibrations
    correction = calibrations.correction()
    if correction.outside_bytes is not None:
        request = replace(request, device=replace(request.device, outside_bytes=correction.outside_bytes))
    budget = budget_of(
        request.config.memory,
        request.device,
        is_at_hand=request.is_at_hand,
        held_bytes=request.held_bytes,
        trains=False,
    )
    job = _Job(request=request, budget=budget, correction=correction)
    try:
        caches = _caches(request)
        # What is known makes another trace of brim's own engine a matter of a second, of `generate` it does not.
        plan = None if caches.has_samples and request.is_slots else job.in_closed_form()
        plan = plan or job.traced(caches)
    except UNTRACEABLE as error:
        if is_a_mistake_of_brims(error):
            raise
        return job.untraced(untraceable(error, request.folder).what)
    for note in (calibrations.note, caches.note):
        if note is not None:
            say(note)
    return plan


@dataclass(frozen=True, kw_only=True)
class _Job:
    request: GenerationRequest
    budget: Budget
    correction: Correction

    @property
    def task(self) -> GenerationTask:
        """What is to be cut into batches."""
        request = self.request
        return GenerationTask(
            lengths=request.lengths,
            max_new_tokens=request.max_new_tokens,
            num_beams=request.config.generation.num_beams,
            fixed_rows=request.fixed_rows,
            engine=request.engine,
            engine_reason=request.engine_reason,
            alone_reason="" if request.is_slots else why_alone(request.settings),
        )

    @property
    def speed(self) -> DeviceSpeed:
        return device_speed(self.request.device, num_cores=torch.get_num_threads())

    def in_closed_form(self) -> GenerationPlan | None:
        """None where tracing is worth its time."""
        request, config, base = self.request, self.request.config, self.request.folder.config
        static_bytes = request.held_bytes or weight_bytes(config, base)
        if static_bytes is None or not request.is_at_hand:
            return None
        costs = closed_cache_costs(
            config,
            base,
            request.lengths,
            static_bytes=static_bytes,
            prefill_tokens=_UNTRACED_PASS.tokens,
            is_slots=request.is_slots,
        )
        if costs is None:
            return None
        cap_bytes = self.budget.reserved_bytes
        plan = cut(self.task, self.budget, costs, _UNTRACED_PASS, source="closed form", cap_bytes=cap_bytes, times=None)
        dtype = _DTYPES.get(str(config.precision), "float32")
        time_s = closed_seconds(
            config,
            base,
            request.lengths,
            costs,
            self.speed,
            rows=plan.rows,
            dtype=dtype,
            is_slots=request.is_slots,
        )
        # Of `generate` a trace takes up to a minute: there, fewer rows by the bound are enough where the job is short.
        is_enough = plan.is_ample or (not request.is_slots and plan.fits)
        if time_s is None or time_s >= _WORTH_TRACING_S or not is_enough:
            return None
        note = f"by a bound in closed form; tracing pays from {format_seconds(_WORTH_TRACING_S)} on"
        return replace(plan, seconds=time_s, notes=(note,))

    def traced(self, caches: TracedCaches) -> GenerationPlan:
        """Few traces, and one more where memory decides."""
        task, scale = self.task, self.correction.scale
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=()):
            region = cache_region(
                task.lengths,
                max_new_tokens=task.max_new_tokens,
                most_rows=task.most_rows,
                cap_bytes=round(self.budget.reserved_bytes / max(scale, 1.0)),
                context=self.request.folder.context_length,
                is_slots=self.request.is_slots,
            )
            model = cache_model(caches.sample, region)
            times = PassTimes(prefill=model.prefill_law, step=model.step_law, speed=self.speed)
            plan = self._settled(task, replace(model.costs, scale=scale), times, caches)
            caches.save()
        if model.load_peak_bytes > plan.cap_bytes:
            return replace(plan, fits=False, notes=(*plan.notes, "the weights do not fit while they are loaded"))
        return plan

    def untraced(self, why: str) -> GenerationPlan:
        """So many rows are tried, and fewer once memory runs out."""
        task = self.task
        rows = min(task.fixed_rows or max(_UNTRACED_ROWS // task.num_beams, 1), task.most_rows)
        return GenerationPlan(
            budget=self.budget,
            prompts=summarize_lengths(task.lengths),
            max_new_tokens=task.max_new_tokens,
            num_beams=task.num_beams,
            costs=None,
            source="none",
            cap_bytes=self.budget.reserved_bytes,
            fixed_rows=task.fixed_rows,
            most_rows=rows,
            memory_rows=None,
            rows_reason=f"{why}; fewer once memory runs out",
            prefill_tokens=_UNTRACED_PASS.tokens,
            prefill_reason=_UNTRACED_PASS.reason,
            shapes=(PlannedRows(first_row=0, rows=rows, columns=task.longest + task.max_new_tokens - 1, peak_bytes=0),),
            total_bytes=None,
            fits=True,
            seconds=None,
            engine=task.engine,
            engine_reason=task.engine_reason,
        )

    def _settled(
        self, task: GenerationTask, costs: CacheCosts, times: PassTimes, caches: TracedCaches
    ) -> GenerationPlan:
        cap_bytes = self.budget.reserved_bytes
        for _ in range(_SETTLED):
            passes = prefill_tokens(costs, times, cap_bytes=cap_bytes, longest=task.longest, usual=task.median)
            costs = replace(costs, prefill_tokens=passes.tokens)
            plan = self._cut(task, costs, passes, times, cap_bytes)
            if plan.rows == plan.memory_rows:
                costs = verified_cache_costs(costs, caches.sample(plan.shapes[0].cache_shape(costs)))
                plan = self._cut(task, costs, passes, times, cap_bytes)
            left_bytes = self.budget.reserved_bytes - caches.overhead_bytes(_way(costs, plan.shapes))
            if left_bytes >= cap_bytes:
                break
            cap_bytes = left_bytes
            plan = self._cut(task, costs, passes, times, cap_bytes)
        return plan

    def _cut(
        self, task: GenerationTask, costs: CacheCosts, passes: PrefillTokens, times: PassTimes, cap_bytes: int
    ) -> GenerationPlan:
        scale, reason = self.correction.scale, self.correction.reason
        notes = (f"what rows add to the memory is corrected by what was {reason}",) if scale != 1 else ()
        return cut(task, self.budget, costs, passes, source="traced", cap_bytes=cap_bytes, times=times, notes=notes)


def _way(costs: CacheCosts, shapes: Sequence[PlannedRows]) -> list[CacheShape]:
    """The job's shapes as the allocator sees them: windows grow, and prompts become shorter."""
    first = shapes[0].cache_shape(costs)
    growing = [max(round(share * first.columns), first.prompt_tokens) for share in _COLUMNS_ON_THE_WAY]
    return [
        *(replace(first, columns=columns) for columns in growing),
        first,
        *(shape.cache_shape(costs) for shape in shapes[1:][-1:]),
    ]


def _caches(request: GenerationRequest) -> TracedCaches:
    device = request.device
    target = None if device.is_cpu else CudaTarget(compute_capability=device.capability or (8, 0))
    return TracedCaches(
        ConfigWorkload(request.config, request.folder, request.architecture, target=target),
        device,
        is_slots=request.is_slots,
        settings=AllocatorSettings.from_environment(os.environ),
        cache_folder=cache_folder(),
    )


_SECTIONS = {"precision", "adapter", "quantization", "initialize", "model_parameters"}


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A job that is to be planned."""

    config: Config  # resolved for the device
    folder: ModelFolder
    architecture: PretrainedConfig
    device: Device
    is_at_hand: bool  # the job will take place on this very device
    lengths: NDArray[np.int64]  # tokens of the prompts, the longest first; at least one
    fixed_rows: int | None  # rows that run together, where somebody says so
    held_bytes: int = 0  # of the weights, where they are loaded already
    engine: str = "slots"
    engine_reason: str = ""

    @property
    def max_new_tokens(self) -> int:
        found = self.config.generation.max_new_tokens
        assert found is not None, "resolved before"
        return found

    @property
    def is_slots(self) -> bool:
        """Whether the cache is one as of brim's own engine, that rows enter and leave."""
        return self.engine != "static"

    @property
    def settings(self) -> dict[str, Any]:
        """Of transformers, but for the tokens that end a text."""
        return generation_settings(self.config.generation, pad_id=0, end_ids=[0])

    @property
    def facts(self) -> dict[str, Any]:
        """What measurements of the model's memory hold for."""
        generation = self.config.generation
        return {
            "phase": "generate",
            "device": self.device.title,
            "base": self.folder.config,
            "settings": self.config.model_dump(mode="json", include=_SECTIONS),
            "engine": self.engine,
            "beams": generation.num_beams,
            "samples": generation.do_sample,
            "code": source_digest(("infer",)),
            "versions": versions(),
        }

    @property
    def calibrations(self) -> Calibrations:
        """What was measured of this model on this device."""
        return Calibrations(cache_folder(), self.facts)


def request_of(
    session: Session, lengths: ArrayLike, *, llm: LLM | None = None, fixed_rows: int | None = None
) -> GenerationRequest:
    """Of a job that is about to start here. lengths: tokens of the prompts."""
    architecture = read_architecture(session.folder, trust_remote_code=session.config.trust_remote_code)
    engine, reason = engine_by_settings(session.config, architecture)
    return GenerationRequest(
        config=session.config,
        folder=session.folder,
        architecture=architecture,
        device=device_at_hand(session.device),
        is_at_hand=True,
        lengths=longest_first(lengths),
        fixed_rows=rows_by_hand(session.config) if fixed_rows is None else fixed_rows,
        held_bytes=0 if llm is None else held_bytes(llm),
        engine=engine,
        engine_reason=reason,
    )


def engine_by_settings(config: Config, architecture: PretrainedConfig) -> tuple[str, str]:
    """Which engine a plan is for, and why. Raises ConfigError where brim's own is asked for and cannot do it."""
    asked = config.generation.engine
    if asked in ("static", "vllm"):
        return asked, "generation.engine"
    settings = generation_settings(config.generation, pad_id=0, end_ids=[0])
    against = why_not_slots(model_class(architecture), architecture, settings)
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    return ("static", against) if against else ("slots", _USUAL if asked == "auto" else "generation.engine")


_USUAL = "nothing that is asked needs another"


def rows_by_hand(config: Config) -> int | None:
    """As the trainer's section says; None: by the memory."""
    trainer = config.trainer
    given = trainer.eval_batch_size if isinstance(trainer, FinetuneTrainer) else trainer.batch_size
    return given if isinstance(given, int) else None


def longest_first(lengths: ArrayLike) -> NDArray[np.int64]:
    """Ordered as the engines run them."""
    return -np.sort(-np.asarray(lengths, dtype=np.int64))


def held_bytes(llm: LLM) -> int:
    """Of weights and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*llm.model.parameters(), *llm.model.buffers()))
