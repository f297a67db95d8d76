"""Describe a measurement: what is asked of one fresh process, what it reports, and what a reader gets.

Torch-free, so that a report needs no torch. All of it goes between processes as JSON. What lies on the device after
each step decides whether steps leave memory behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

from pydantic import TypeAdapter

from brim.config.schema import Config, FinetuneTrainer
from brim.memory.events import Phase
from brim.models.folders import ModelFolder

WARM_UP_STEPS = 1  # the optimizer's state and the caches of kernels are created in the first


LEAST_RISES = 3  # in a row: fewer happen by chance where lengths vary


RowLengths = tuple[tuple[int, ...], ...]  # the tokens of each row of each step; the last step's are repeated


Message = TypeVar("Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Name one model, loaded once, and the phases to run on it."""

    config: Config
    folder: ModelFolder
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row that is evaluated, and of each prompt
    step_lengths: RowLengths
    num_steps: int  # of training: updates
    phases: tuple[Phase, ...]  # after loading
    device: str | None  # None: the local one

    @property
    def trainable(self) -> bool:
        """Return whether the model is loaded to be trained."""
        return isinstance(self.config.trainer, FinetuneTrainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Hold the figures of one model, loaded once."""

    device: str
    kind: str
    baseline_bytes: int
    peaks: tuple[PhasePeak, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Hold the most that a phase took, and what was left after it."""

    phase: Phase
    step: int | None  # of training, from 1: the optimizer's state is created in the first one
    allocated_bytes: int | None = None  # peak, as PyTorch's CUDA allocator counts; None on a CPU
    reserved_bytes: int | None = None  # peak; None on a CPU
    outside_bytes: int | None = None  # on the device, but not PyTorch's: context, libraries, others; None on a CPU
    total_bytes: int  # reserved + outside; on a CPU the peak resident set
    end_bytes: int  # at the phase's end: allocated; on a CPU resident
    baseline_bytes: int  # before the weights, in the process that ran the phase: resident, or outside PyTorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Describe live bytes that rose from step to step."""

    bytes_per_step: int  # median rise
    end_bytes: tuple[int, ...]  # after each step

    def __str__(self) -> str:
        steps = len(self.end_bytes) - 1
        return f"live bytes rose by {self.bytes_per_step:,} a step, {steps} times in a row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what one workload took on one device."""

    device: str  # its name; "cpu"
    kind: str  # cpu or cuda
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row; with generate, of each prompt
    num_layers: int  # of the model that the peaks are for
    layers_run: tuple[int, ...]  # what was run: (num_layers,), or the two depths that the peaks are extrapolated from
    baseline_bytes: int  # that of the first phase
    peaks: tuple[PhasePeak, ...]  # in the order of the phases; several of train, one a step
    leak: Leak | None
    notes: tuple[str, ...]  # what a reader of the figures has to know


def as_json(message: Any) -> dict[str, Any]:
    """Return a message for another process, or for a file; of a configuration, what was set."""
    told: dict[str, Any] = TypeAdapter(type(message)).dump_python(message, mode="json", exclude_unset=True)
    return told


def of_json(kind: type[Message], told: Mapping[str, Any]) -> Message:
    """Return the message of this kind that `as_json` gave."""
    return TypeAdapter(kind).validate_json(json.dumps(told))


def rise_per_step(end_bytes: Sequence[int], *, tolerance_bytes: int) -> int | None:
    """Return the median rise where each step after the first ended above the one before it; None where one did not.

    end_bytes: live after each step, equal in shape. tolerance_bytes: rises that do not count, such as an allocator's
    rounding.
    """
    counted = end_bytes[WARM_UP_STEPS:]
    rises = [after - before for before, after in pairwise(counted)]
    if len(rises) < LEAST_RISES or min(rises) <= tolerance_bytes:
        return None
    return round(median(rises))
