"""Describe what is to be planned: a training, passes that score rows, or a generation, of a model on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching import MULTIPLE
from brim.config import EFFECTIVE, Choice, ways_given, with_effective_rows
from brim.config.schema import Config, FinetuneTrainer
from brim.config.text import dotted
from brim.data.tokens import TokenRows, rows_of_step
from brim.distributed import sharding_obstacles
from brim.errors import ConfigError
from brim.infer.engines import MemoryRoom, StaticEngine, generation_settings
from brim.memory import ConfigWorkload, Offload, tracing
from brim.memory.allocator import AllocatorSettings
from brim.memory.cuda import CudaTarget
from brim.memory.devices import Budget, Device, budget_of, device_at_hand, enforce
from brim.memory.fsdp import Sharding
from brim.models import read_architecture
from brim.models.folders import ModelFolder
from brim.models.kernels import execution_choices
from brim.notes import Say
from brim.planning.candidates import Task
from brim.planning.costs import Calibrations, Correction, TracedWorkload, Traces, versions
from brim.planning.phases import faults, larger_than_an_epoch, last_step, phase_costs, steps_between, stretches_of
from brim.planning.plan import PhasePlan, TrainingPlan, Way
from brim.session import Session, Shortfall
from brim.storage import cache_folder, source_digest
from brim.train import LearningRate, RunLength
from brim.units import format_count, format_seconds

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_SECTIONS = {"precision", "adapter", "quantization", "initialize", "model_parameters"}


# Three to six traces take a few seconds: of a job ten times as long they are a tenth at most.
WORTH_TRACING_S = 30.0


NOT_TRACED = f"by an upper bound, not traced: tracing pays from {format_seconds(WORTH_TRACING_S)} on"


_TENTHS = 10  # predictions take all tokens for supervised, so runs are compared where about as many are


STRATEGY_KEY = "backend.trainer.strategy"


LAYOUT_KEY = "trainer.packing"


RequestT = TypeVar("RequestT", bound="Request")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Describe work that is to be planned: a model, by its resolved configuration, on a device."""

    config: Config
    folder: ModelFolder
    architecture: PretrainedConfig
    device: Device
    is_at_hand: bool  # the work will take place on this very device
    held_bytes: int = 0  # of the weights, where they are loaded already
    ranks: int = 1  # that do it together, each on such a device
    shortfall: Shortfall | None = None  # of the one that may take least

    @staticmethod
    def at_hand(session: Session) -> dict[str, Any]:
        """Return what a request of the session's model on its own device begins with."""
        return {
            "folder": session.folder,
            "architecture": read_architecture(session.folder, trust_remote_code=session.config.trust_remote_code),
            "device": device_at_hand(session.device).among(session.num_processes),
            "is_at_hand": True,
            "ranks": session.world_size,
            "shortfall": session.shortfall,
        }

    @property
    def trains(self) -> bool:
        """Return whether there will be a backward pass."""
        return False

    @property
    def multiple(self) -> int:
        """Return the multiple to which packed rows are filled up; 1: rows are padded."""
        return MULTIPLE if self.config.trainer.packing is True else 1

    @property
    def own_facts(self) -> dict[str, Any]:
        """Return what measurements of the memory depend on beside model, adapter and device."""
        return {}

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that measurements of the model's memory depend on."""
        return {
            "device": self.device.title,
            "base": self.folder.config,
            "settings": self.config.model_dump(mode="json", include=_SECTIONS),
            "versions": versions(),
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            **self.own_facts,
        }

    @property
    def calibrations(self) -> Calibrations:
        """Return what was measured of this model, with this adapter, on this device."""
        return Calibrations(cache_folder(), self.facts)

    def corrected(self: RequestT, *, say: Say) -> tuple[RequestT, Correction]:
        """Return the request with what was seen outside PyTorch, if anything was, and all that was measured."""
        calibrations = self.calibrations
        correction = calibrations.correction()
        if calibrations.note is not None:
            say(calibrations.note)
        if correction.outside_bytes is None:
            return self, correction
        return replace(self, device=replace(self.device, outside_bytes=correction.outside_bytes)), correction

    def budget(self) -> Budget:
        """Return the budget beside what the model holds."""
        return budget_of(
            self.config.memory,
            self.device,
            is_at_hand=self.is_at_hand,
            held_bytes=self.held_bytes,
            trains=self.trains,
            shortfall=self.shortfall,
        )

    def keep_to(self, budget: Budget) -> None:
        """Have the process exceed no budget that the configuration sets."""
        if self.config.memory.budget != "auto":
            enforce(budget, self.device)

    def execution_choices(self) -> tuple[Choice, ...]:
        """Say whether rows are packed, and by which kernels layers compute, as far as that is open."""
        capability = self.device.gpu_capability
        at_hand = torch.device("cuda") if self.is_at_hand and capability is not None else None
        options: Any = {"capability": capability, "at_hand": at_hand, "trains": self.trains}
        return execution_choices(self.config, lambda: self.architecture, **options)

    def settled(self: RequestT) -> RequestT:
        """Return the request with these choices made."""
        return replace(self, config=Choice.made_in(self.config, self.execution_choices()))

    def tracing(self) -> AbstractContextManager[None]:
        """Let one thread trace at a time. Raises UntraceableError for an architecture that cannot be traced."""
        return tracing(self.folder)

    @contextmanager
    def traces(
        self,
        make: Callable[[ConfigWorkload], TracedWorkload],
        *,
        config: Config | None = None,
        is_kept: bool = True,
        sharding: Sharding | None = None,
        like: Traces | None = None,
    ) -> Iterator[Traces]:
        """Yield the traces of a workload. config: None: the request's. is_kept: on disk. sharding: of the weights.

        like: of the same workload in another sharding, whose recordings serve these, too.

        Raises UntraceableError for an architecture that cannot be traced.
        """
        target = CudaTarget.of(self.device.gpu_capability)
        with self.tracing():
            workload = ConfigWorkload(config or self.config, self.folder, self.architecture, target=target)
            yield Traces(
                make(workload) if like is None else like.workload,
                self.device,
                settings=AllocatorSettings.from_environment(os.environ),
                folder=cache_folder() if is_kept else None,
                sharding=sharding,
                like=like,
            )


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Request):
    """Describe a training run that is to be planned. Its configuration is resolved, but for what a plan decides."""

    rows: TokenRows
    length: RunLength
    has_begun: bool = False  # it goes on as it was begun: nothing but its partition is open
    is_sized_by_memory: bool = False  # its effective batch is the largest that fits, of those up to its own

    @staticmethod
    def ranks_asked(config: Config) -> int:
        """Return backend.trainer.num_workers; one where it is open."""
        return config.backend.trainer.num_workers or 1

    @property
    def trainer(self) -> FinetuneTrainer:
        assert isinstance(self.config.trainer, FinetuneTrainer), "there is no plan where nothing is trained"
        return self.config.trainer

    @property
    def trains(self) -> bool:
        return True

    @property
    def is_bounded_by_memory(self) -> bool:
        """Return whether the sizes that it asks for depend on how many rows fit together."""
        return self.is_sized_by_memory or (self.trainer.batch_increase_function is not None and not self.has_begun)

    @property
    def offload(self) -> Offload:
        """Return what lies on the host; weights: gradients and states, too."""
        return self.config.memory.offload

    @property
    def sharded(self) -> Sequence[bool]:
        """Return whether the weights may be sharded over the ranks, the preferred answer first."""
        asked = self.config.backend.trainer.strategy
        if self.offload == "weights" or (self.ranks > 1 and asked == "fsdp"):
            return (True,)
        is_open = self.ranks > 1 and (asked, self.offload) == ("auto", "none")
        is_open = is_open and not any(sharding_obstacles(self.config))
        return (False, True) if is_open else (False,)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Return the rows' positions as the first epoch takes them; each epoch has another order, of the same kind."""
        num_rows, seed = len(self.rows), self.config.random_seed
        return rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=0, size=num_rows)[1]

    @cached_property
    def task(self) -> Task:
        """Return what the run is to do, whatever the strategy."""
        batch_size = self.trainer.batch_size
        effective = min(self.length.largest_size, len(self.rows))
        return Task(
            lengths=self.rows.lengths[self.order],
            effective_batch_size=effective,
            fixed_rows=None if batch_size == "auto" else min(batch_size, effective),
            largest=self.trainer.use_maximum_batch_size,
        )

    @property
    def leaves_layout_open(self) -> bool:
        """Return whether the plan is to say if rows are packed, as it does on a CPU."""
        return self.trainer.packing == "auto" and self.device.is_cpu

    def in_layout(self, *, is_packed: bool) -> PlanRequest:
        """Return the request with rows packed or padded."""
        return replace(self, config=self.config.having(LAYOUT_KEY, is_packed))

    def execution_choices(self) -> tuple[Choice, ...]:
        """Say how the model computes, as far as that is open and not the plan's."""
        settled = self.in_layout(is_packed=False) if self.leaves_layout_open else self
        return super(PlanRequest, settled).execution_choices()

    @property
    def own_facts(self) -> dict[str, Any]:
        """Return what the measurements of such work depend on (see Request)."""
        supervised = round(_TENTHS * int(self.rows.num_supervised.sum()) / max(int(self.rows.lengths.sum()), 1))
        facts = {"optimizer": self.trainer.optimizer.model_dump(mode="json"), "supervised": supervised}
        return facts if self.offload == "none" else {**facts, "offload": self.offload}

    def config_of(self, way: Way) -> Config:
        """Return the configuration of a strategy."""
        # Where chunks are not asked for, whether the architecture allows them shows once it is built.
        chunked = self.trainer.chunked_loss if way.chunked_loss else False
        update = {"enable_gradient_checkpointing": way.gradient_checkpointing, "chunked_loss": chunked}
        return self.config.model_copy(update={"trainer": self.trainer.model_copy(update=update)})

    def require_phases(self) -> None:
        """Raise ConfigError where the run could not take all the sizes that it asks for, or all its learning rates."""
        length, where = self.length, self._key
        self._learning_rate()
        problems = faults(length.schedule, num_rows=length.num_rows, total_samples=length.total_samples, where=where)
        if length.adaptation is not None and length.adaptation.largest > length.num_rows:
            largest = length.adaptation.largest
            problems.append(larger_than_an_epoch("max", largest, num_rows=length.num_rows, where=where))
        if problems:
            raise ConfigError(*problems)

    def phase_notes(self, *, fits: bool = True) -> Iterator[str]:
        """Yield what is worth knowing of the batch and its phases. fits: whether there is a strategy that fits."""
        if self.is_sized_by_memory and fits:
            yield str(self.largest_choice())
        yield from self.length.notes
        every, taken = len(self.length.schedule.phases), len(stretches_of(self.length))
        if taken < every:
            none = f"{every - taken:,} {'takes' if every - taken == 1 else 'take'} no step"
            yield f"{self._key}: of {every:,} phases {none}, since a step of the one before reaches beyond"

    def with_phases(self, plan: TrainingPlan) -> TrainingPlan:
        """Return the plan with what the run's phases take in the chosen strategy, and so with the run's seconds."""
        length = self.length
        is_known = length.adaptation is None
        plan = replace(
            plan,
            total_samples=length.total_samples,
            smallest_batch_size=length.sizes[0],
            num_phases=len(stretches_of(length)),
            steps_between=None if is_known else steps_between(length),
        )
        if plan.chosen is None or plan.costs is None:
            return plan
        phases, seconds = phase_costs(length, self.task, plan.chosen, plan.costs)
        known, between = (seconds[0], None) if is_known else (None, seconds)
        return self.with_learning_rates(replace(plan, phases=phases, seconds=known, seconds_between=between))

    def with_learning_rates(self, plan: TrainingPlan) -> TrainingPlan:
        """Return the plan with this run's learning rates: an earlier plan for the same work may have had others."""
        rate, num_rows = self._learning_rate(), self.length.num_rows
        phases = tuple(
            replace(phase, learning_rates=None if phase.first_sample is None else _rates(phase, rate, num_rows))
            for phase in plan.phases
        )
        return replace(plan, phases=phases)

    def largest_batch(self, plan: TrainingPlan) -> int:
        """Return how many of the longest rows fit together, up to all rows; 1 where the plan cannot tell."""
        if plan.chosen is None or plan.costs is None:
            return 1
        longest, most = [self.task.longest], len(self.rows)
        (rows,) = plan.costs.rows_that_fit(longest, cap_bytes=plan.chosen.cap_bytes, most=most).tolist()
        return max(int(rows), 1)

    def bounded(self, bound: int) -> PlanRequest:
        """Return the request with a batch of so many rows, or at most so many where batch_increase_function leads."""
        request = self
        if self.is_sized_by_memory:
            request = replace(self, config=with_effective_rows(self.config, bound))
        known = self.length.increases
        length = RunLength.of(request.trainer, self.rows, seed=self.config.random_seed, bound=bound, known=known)
        return replace(request, length=length)

    def largest_choice(self, *, found: str = "") -> Choice:
        """Return the effective batch of a run that takes as many rows as fit together. found: how a search found it."""
        rows, tokens = self.trainer.effective_batch_size, self.task.longest
        limit = f"{rows:,} of the longest rows, {format_count(tokens, 'token')}"
        limit = "all rows to train on" if rows == len(self.rows) else limit
        limit = "trainer.max_batch_size" if rows == self.trainer.max_batch_size else limit
        return Choice(
            key=dotted(EFFECTIVE),
            value=rows,
            reason=f"use_maximum_batch_size, the largest that fits: {found or limit}; so the memory decides what is "
            "learned, and another card may learn otherwise",
        )

    @property
    def _key(self) -> str:
        return dotted(next(iter(ways_given(self.trainer)), EFFECTIVE))

    def _learning_rate(self) -> LearningRate:
        return LearningRate.of(self.trainer, self.rows, self.length, seed=self.config.random_seed)


def _rates(phase: PhasePlan, rate: LearningRate, num_rows: int) -> tuple[float, float]:
    assert phase.first_sample is not None, "it is known"
    assert phase.num_samples is not None, "it is known"
    first = min(phase.size, num_rows - phase.first_sample % num_rows, phase.num_samples)
    before_last, last = last_step(phase.size, phase.first_sample, phase.num_samples, num_rows=num_rows)
    return (
        rate(consumed_samples=phase.first_sample, batch_samples=first, size=phase.size),
        rate(consumed_samples=before_last, batch_samples=last, size=phase.size),
    )


@dataclass(frozen=True, kw_only=True)
class ForwardRequest(Request):
    """Describe passes without gradients that are to be planned."""

    lengths: NDArray[np.int64]  # tokens of each of at least one row
    beside_bytes: int | None  # tensors that will be there in the midst of training; None: nothing is trained
    whole_tokens: int | None  # of batches that are made already, and stay whole where memory allows it

    @property
    def trains(self) -> bool:
        return self.beside_bytes is not None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(Request):
    """Describe a job that is to be planned."""

    lengths: NDArray[np.int64]  # tokens of the prompts, the longest first; at least one
    fixed_rows: int | None  # rows that run together, where somebody says so
    engine: str = "slots"
    engine_reason: str = ""
    beside_bytes: int = 0  # of held_bytes, what no pass reads: weights that are put back afterwards
    num_members: int = 1  # processes that generate, of which this one has these prompts

    @property
    def max_new_tokens(self) -> int:
        found = self.config.generation.max_new_tokens
        assert found is not None, "resolved before"
        return found

    @property
    def is_slots(self) -> bool:
        """Return whether the cache is as of brim's own engine: one that rows enter and leave."""
        return self.engine != "static"

    @property
    def longest(self) -> int:
        return int(self.lengths[0])

    @property
    def median(self) -> int:
        return int(self.lengths[len(self.lengths) // 2])

    @cached_property
    def alone_reason(self) -> str:
        """Return why rows go one by one, where they do."""
        return "" if self.is_slots else StaticEngine.why_alone(self.settings)

    @property
    def most_rows(self) -> int:
        """Return how many rows can run together at all."""
        return 1 if self.alone_reason else min(self.fixed_rows or MemoryRoom.MOST_ROWS, len(self.lengths))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of transformers, but for the tokens that end a text."""
        return generation_settings(self.config.generation, pad_id=0, end_ids=[0])

    @property
    def own_facts(self) -> dict[str, Any]:
        """Return what the measurements of such work depend on (see Request)."""
        generation = self.config.generation
        return {
            "phase": "generate",
            "engine": self.engine,
            "beams": generation.num_beams,
            "samples": generation.do_sample,
            "packed": self.multiple > 1,
            "code": source_digest(("infer",)),
            **({"beside": self.beside_bytes} if self.beside_bytes else {}),
        }
