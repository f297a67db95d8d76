"""Which keys move the effective batch while a run lasts."""

from __future__ import annotations

from brim.config.places import Path
from brim.config.schema import FinetuneTrainer, OptimizerConfig

WAYS = ("batch_rampup", "batch_schedule", "batch_increase_function", "batch_adaptation")


def ways_given(trainer: FinetuneTrainer) -> list[Path]:
    """The keys that are set; valid configurations have at most one."""
    return [("trainer", name) for name in WAYS if getattr(trainer, name) is not None]


def moves_batch(trainer: FinetuneTrainer) -> bool:
    """Whether the effective batch is asked to move."""
    return bool(ways_given(trainer))


def has_beta2(optimizer: OptimizerConfig) -> bool:
    """Whether it divides by a running average of squared gradients, with a beta of its own and a bias correction."""
    return optimizer.type.removeprefix("paged_").removesuffix("_8bit") in ("adam", "adamw")
