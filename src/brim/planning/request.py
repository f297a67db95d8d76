"""Describe what is to be planned: a model on a device; for generation, the lengths of prompts and the engine, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, Problem
from brim.infer.engines import MemoryRoom, SlotsEngine, StaticEngine, generation_settings, model_class
from brim.memory import Asked
from brim.memory.devices import Budget, Device, budget_of, device_at_hand
from brim.models import LLM, read_architecture
from brim.models.folders import ModelFolder
from brim.planning.costs import Calibrations, Correction, versions
from brim.session import Session
from brim.storage import cache_folder, source_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_SECTIONS = {"precision", "adapter", "quantization", "initialize", "model_parameters"}


RequestT = TypeVar("RequestT", bound="Request")


@dataclass(frozen=True, kw_only=True)
class Request(ABC):
    """Describe work that is to be planned: a model, by its resolved configuration, on a device."""

    config: Config
    folder: ModelFolder
    architecture: PretrainedConfig
    device: Device
    is_at_hand: bool  # the work will take place on this very device

    @property
    @abstractmethod
    def own_facts(self) -> dict[str, Any]:
        """Return what measurements of the memory depend on beside model, adapter and device."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that measurements of the model's memory depend on."""
        return {
            "device": self.device.title,
            "base": self.folder.config,
            "settings": self.config.model_dump(mode="json", include=_SECTIONS),
            "versions": versions(),
            **self.own_facts,
        }

    @property
    def calibrations(self) -> Calibrations:
        """Return what was measured of this model, with this adapter, on this device."""
        return Calibrations(cache_folder(), self.facts)

    def corrected(self: RequestT, correction: Correction) -> RequestT:
        """Return the request with what was seen outside PyTorch, if anything was."""
        if correction.outside_bytes is None:
            return self
        return replace(self, device=replace(self.device, outside_bytes=correction.outside_bytes))


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(Request):
    """Describe a job that is to be planned."""

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

    def budget(self, *, is_at_hand: bool | None = None) -> Budget:
        """Return the budget beside what the model holds. is_at_hand: None: as the request says."""
        return budget_of(
            self.config.memory,
            self.device,
            is_at_hand=self.is_at_hand if is_at_hand is None else is_at_hand,
            held_bytes=self.held_bytes,
            trains=False,
        )

    @property
    def own_facts(self) -> dict[str, Any]:
        """Return what the measurements of such work depend on (see Request)."""
        generation = self.config.generation
        return {
            "phase": "generate",
            "engine": self.engine,
            "beams": generation.num_beams,
            "samples": generation.do_sample,
            "code": source_digest(("infer",)),
        }


def generation_request(
    session: Session,
    lengths: ArrayLike,
    *,
    llm: LLM | None = None,
    fixed_rows: int | None = None,
    asked: Asked | None = None,
    is_at_hand: bool = True,
) -> GenerationRequest:
    """Return the request of a job that is about to start here, or, with `asked`, of one on the device that it names.

    lengths: tokens of the prompts. fixed_rows: None: as the trainer's section says.
    Raises ConfigError where brim's own engine is asked for and cannot do it.
    """
    config, folder = session.config, session.folder
    if asked is None:
        architecture = read_architecture(folder, trust_remote_code=config.trust_remote_code)
        device = device_at_hand(session.device)
    else:
        architecture, device = asked.architecture, asked.device
    engine, reason = _engine(config, architecture)
    return GenerationRequest(
        config=config,
        folder=folder,
        architecture=architecture,
        device=device,
        is_at_hand=is_at_hand,
        lengths=-np.sort(-np.asarray(lengths, dtype=np.int64)),
        fixed_rows=rows_by_hand(config) if fixed_rows is None else fixed_rows,
        held_bytes=0 if llm is None else llm.held_bytes,
        engine=engine,
        engine_reason=reason,
    )


def cannot(engine: str, why: str) -> Problem:
    """Return the problem of an engine that was asked for and does not do what the other keys ask."""
    return Problem(
        what=f"generation.engine is {engine}, and {why}", where="generation.engine", fix="set generation.engine: auto"
    )


def _engine(config: Config, architecture: PretrainedConfig) -> tuple[str, str]:
    """Return which engine a plan is for, and why."""
    asked = config.generation.engine
    if asked in ("static", "vllm"):
        return asked, "generation.engine"
    settings = generation_settings(config.generation, pad_id=0, end_ids=[0])
    against = SlotsEngine.why_not(model_class(architecture), architecture, settings)
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    return ("static", against) if against else ("slots", _USUAL if asked == "auto" else "generation.engine")


_USUAL = "the configuration needs no other"


def rows_by_hand(config: Config) -> int | None:
    """Return the rows that run together as the trainer's section says; None: by the memory."""
    trainer = config.trainer
    given = trainer.eval_batch_size if isinstance(trainer, FinetuneTrainer) else trainer.batch_size
    return given if isinstance(given, int) else None
