"""What a plan for generation is asked for: a configuration, a device and the lengths of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.api.inference import cannot
from brim.api.memory import read_architecture
from brim.api.plan import device_at_hand
from brim.api.session import Session
from brim.config import Config, FinetuneTrainer
from brim.digests import source_digest
from brim.errors import ConfigError
from brim.infer.generation_settings import generation_settings
from brim.infer.slots_support import model_class, why_not_slots
from brim.memory.device import Device
from brim.models.folder import ModelFolder
from brim.models.llm import LLM
from brim.planning.cache import cache_folder
from brim.planning.calibration import Calibrations
from brim.planning.shape_cache import versions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
        """Whether the cache is one as of brim's own engine, that rows enter and leave; those in pages hold as much."""
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
    if asked in ("static", "paged", "vllm"):
        return asked, "generation.engine"
    settings = generation_settings(config.generation, pad_id=0, end_ids=[0])
    against = why_not_slots(model_class(architecture), architecture, settings)
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    return ("static", against) if against else ("slots", "" if asked == "auto" else "generation.engine")


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
